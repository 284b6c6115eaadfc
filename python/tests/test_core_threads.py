"""Threads, the GIL, OpenMP, and lifetimes: objects end in any order, also with the interpreter."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import folio
import folio.context
from core_support import Arrays, Step
from folio import _abi as abi
from numpy_math import check, random


def big_step(context: folio.Context) -> tuple:
    """A forward that is worth threads."""
    step = Step(Arrays("numpy", "cpu", context), [256], [256], heads=8, kv_heads=8, size=64)
    plan = step.ready()
    return step, plan


def test_python_goes_on_during_a_forward() -> None:
    """One thread runs forwards; this one counts, and gets the GIL only where a call gives it up."""
    step, plan = big_step(folio.Context("cpu", threads=1))
    inputs = step.inputs()
    stop, forwards = threading.Event(), []

    def compute() -> None:
        while not stop.is_set() and len(forwards) < 5000:
            plan.forward(*inputs, cache=step.cache)
            forwards.append(1)

    thread = threading.Thread(target=compute)
    old = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        for _ in range(50):
            time.sleep(0)  # lets the other thread have the GIL
        stop.set()
    finally:
        sys.setswitchinterval(old)
        thread.join()
    assert len(forwards) < 5000


BARRIER = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
static atomic_int arrived;
atomic_int alone;
/* A folio_executor whose calls wait for one another, two by two. */
void parallel_for(void *user, int64_t count, void (*fn)(void *, int64_t), void *task)
{
    int pair = (atomic_fetch_add(&arrived, 1) + 2) / 2 * 2;
    time_t begin = time(NULL);
    while (atomic_load(&arrived) < pair) {
        if (time(NULL) - begin > 60) {
            atomic_store(&alone, 1);
            break;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        fn(task, i);
    }
}
"""


def test_two_threads_are_inside_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "barrier.c").write_text(BARRIER)
    path = str(tmp_path / "barrier.so")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, tmp_path / "barrier.c"], check=True)
    native = ctypes.CDLL(path)
    executor = abi.folio_executor(ctypes.cast(native.parallel_for, ctypes.c_void_p).value, None, 2)
    step = Step(Arrays("numpy", "cpu", folio.Context("cpu")), [256], [256], heads=8, kv_heads=8, size=64)
    step.cache.write(0, step.k, step.v, step.slots(0))
    monkeypatch.setattr(folio.context, "_openmp_executor", lambda _: (executor, native))
    step.arrays.context = folio.Context("cpu", threads="openmp")
    plan = step.ready()
    spaces = [plan.new_workspace() for _ in range(2)]
    outs: list = [None, None]

    def compute(i: int) -> None:
        for _ in range(3):
            outs[i] = plan.forward(step.q, cache=step.cache, workspace=spaces[i])

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ctypes.c_int.in_dll(native, "alone").value == 0
    np.testing.assert_array_equal(outs[0], outs[1])
    check(outs[0], step.expected()[0])


def test_threads_run_one_plan_with_workspaces_of_their_own(arrays: Arrays) -> None:
    step = Step(arrays, [1, 16], [400, 300])
    plan = step.ready()
    q = step.inputs()[0]
    want = arrays.get(plan.forward(*step.inputs(), cache=step.cache))
    outs: list = []

    def work() -> None:
        workspace = plan.new_workspace()
        outs.extend([arrays.get(plan.forward(q, cache=step.cache, workspace=workspace)) for _ in range(50)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 200 and all(np.array_equal(out, want) for out in outs)


# --- OpenMP ---


def num_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_openmp_gives_the_same_bits_and_starts_no_thread() -> None:
    torch.ones(2000, 2000).sum()  # torch's threads are there
    torch.mm(torch.ones(500, 500), torch.ones(500, 500))
    own = folio.Context("cpu", threads=2)
    step, plan = big_step(own)
    expected = plan.forward(*step.inputs(), cache=step.cache)
    own.close()
    before = num_tasks()
    context = folio.Context("cpu", threads="openmp")
    assert context.num_threads == torch.get_num_threads()
    again, plan = big_step(context)
    for _ in range(5):
        out = plan.forward(*again.inputs(), cache=again.cache)
    np.testing.assert_array_equal(out, expected)
    assert num_tasks() <= before


SIX_THREADS = """
import os, torch, folio
torch.set_num_threads(6)
torch.ones(1 << 20).mul(2).sum()
torch.mm(torch.ones(500, 500), torch.ones(500, 500))
before = set(os.listdir("/proc/self/task"))
context = folio.Context("cpu", threads="openmp")
for tokens in (700, 3, 40, 1, 400, 8, 700):
    q = torch.ones(tokens, 1, 64)
    folio.attend(q, q, q, context=context)
torch.ones(1 << 20).mul(2).sum()
print(context.num_threads, before == set(os.listdir("/proc/self/task")))
"""


def test_openmp_keeps_the_threads_of_the_process() -> None:
    """Small steps too: a team with fewer threads would end the others, and with them their binding to cores."""
    done = subprocess.run([sys.executable, "-c", SIX_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["6", "True"]


TWO_RUNTIMES = """
import ctypes, os, shutil, sys
import torch
import folio

torch.set_num_threads(5)
runtime = next(line.split()[5] for line in open("/proc/self/maps") if "/libgomp" in line)
for name in ("libgomp-a.so.1", "torch-libgomp.so.1", "libgomp.so.1"):
    ctypes.CDLL(shutil.copy(runtime, os.path.join(sys.argv[1], name)))
print(folio.Context("cpu", threads="openmp").num_threads)
"""


def test_openmp_is_that_of_torch_where_there_are_several(tmp_path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", TWO_RUNTIMES, folder], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5"]


def test_a_pool_of_its_own_starts_threads() -> None:
    """What the test above would see if OpenMP were not used."""
    before = num_tasks()
    context = folio.Context("cpu", threads=3)
    assert num_tasks() == before + 2
    context.close()


def test_the_default_context_follows_torch() -> None:
    code = "import {0}folio; print(folio.default_context().num_threads)"
    threads = [subprocess.run([sys.executable, "-c", code.format(first)], capture_output=True, text=True, check=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}).stdout for first in ("torch, ", "")]
    assert [int(n) for n in threads] == [1, len(os.sched_getaffinity(0))]


def test_openmp_without_a_runtime_is_rejected() -> None:
    code = "import folio\ntry: folio.Context(threads='openmp')\nexcept folio.UnsupportedError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "this process has loaded no OpenMP runtime" in done.stdout
    with pytest.raises(folio.ArgumentError, match='threads is \'many\'; it must be a number, None or "openmp"'):
        folio.Context(threads="many")


@pytest.mark.parametrize("bad", [{"threads": 257}, {"threads": -1}, {"level": "avx1024"}, {"backend": "tpu"},
                                 {"backend": "cpu", "device": 3}], ids=str)
def test_bad_contexts(bad: dict) -> None:
    with pytest.raises(folio.Error) as caught:
        folio.Context(**bad)
    assert len(str(caught.value)) > 10


# --- lifetimes ---


def everything(context: folio.Context) -> dict:
    cache = folio.KVCache(context, num_blocks=4, num_kv_heads=2, head_size=32, dtype="f32")
    attention = folio.Attention(context, num_heads=4, num_kv_heads=2, head_size=32)
    pool = folio.Pool(cache)
    return {"cache": cache, "attention": attention, "pool": pool, "sequence": pool.sequence(),
            "plan": folio.Plan(attention, cache=cache, max_seqs=1, max_query_tokens=8, max_seq_len=8),
            "batch": folio.Batch(context), "rotary": folio.Rotary(context, num_dims=16, num_positions=4),
            "array": folio.DeviceArray(context, (4,), "f32")}


def test_objects_end_in_any_order(context: folio.Context) -> None:
    names = list(everything(context))
    orders = [*itertools.islice(itertools.permutations(names), 0, None, 997), names[::-1]]
    for order in orders:
        things = everything(context)
        for name in order:
            things[name].close()
            things[name].close()  # twice is fine


def test_objects_keep_what_they_need(context: folio.Context) -> None:
    """A plan and a sequence still work when everything they were made from is forgotten."""
    things = everything(context)
    plan, sequence, cache = things["plan"], things["sequence"], things["cache"]
    del things
    gc.collect()
    sequence.reserve(3)
    batch = folio.Batch(context)
    batch.add_sequences([sequence])
    plan.update(batch)
    del batch
    gc.collect()
    arrays = Arrays("numpy" if context.on_host else "device", context.place[0], context)
    q, k, v = (arrays.put(random((3, heads, 32))) for heads in (4, 2, 2))
    plan.forward(q, k, v, cache=cache)
    context.wait()


def test_objects_are_freed_with_their_python_object(context: folio.Context) -> None:
    for name, thing in everything(context).items():
        end = thing._end
        reference = weakref.ref(thing)
        assert end.alive
        del thing
    gc.collect()
    assert reference() is None and not end.alive


def test_closed_objects_say_so(context: folio.Context) -> None:
    things = everything(context)
    for thing in things.values():
        thing.close()
    calls = {"cache": lambda t: t.gather(0, [0]), "pool": lambda t: t.stats(), "sequence": lambda t: t.info(),
             "plan": lambda t: t.info(), "batch": lambda t: t.info(), "array": lambda t: t.numpy(),
             "attention": lambda t: folio.Plan(t, max_seqs=1, max_query_tokens=1, max_seq_len=1)}
    for name, call in calls.items():
        with pytest.raises(folio.ArgumentError, match=f"^this {type(things[name]).__name__} is closed$"):
            call(things[name])
    arrays = Arrays("numpy" if context.on_host else "device", context.place[0], context)
    q = arrays.put(random((3, 4, 32)))
    open_plan = everything(context)["plan"]
    for plan, cache, name in ((open_plan, things["cache"], "KVCache"), (things["plan"], None, "Plan")):
        with pytest.raises(folio.ArgumentError, match=f"^this {name} is closed$"):
            plan.forward(q, cache=cache)


def test_with_closes() -> None:
    with folio.Context("cpu") as context:
        assert context.kernels()
    with pytest.raises(folio.ArgumentError, match="this Context is closed"):
        context.kernels()


EXIT = """
import gc, sys, threading
import numpy as np
import folio
context = folio.Context("cpu", threads=2)
cache = folio.KVCache(context, num_blocks=4, num_kv_heads=2, head_size=32, dtype="f32")
attention = folio.Attention(context, num_heads=4, num_kv_heads=2, head_size=32)
pool = folio.Pool(cache, host_blocks=4, on_event=lambda e: None)
sequence = pool.sequence()
plan = folio.Plan(attention, cache=cache, max_seqs=1, max_query_tokens=64, max_seq_len=64)
batch = folio.Batch(context)
sequence.reserve(30)
batch.add_sequences([sequence])
plan.update(batch)
q = np.ones((30, 4, 32), np.float32)
k = np.ones((30, 2, 32), np.float32)
def work():
    while True:
        plan.forward(q, k, k, cache=cache)
{case}
print("end")
"""


@pytest.mark.parametrize("case", [
    "",
    "gc.disable(); cycle = [plan, sequence]; cycle.append(cycle)",
    "sys.modules['kept'] = (sequence, plan, batch, pool)",
    "threading.Thread(target=work, daemon=True).start()",
    "default = folio.default_context(); folio.attend(q, k, k)",
    "view = cache.arrays()[0].__dlpack__()",
    "import torch; t = torch.from_dlpack(folio.DeviceArray(context, (4,), 'f32'))",
    "import torch; kept = torch.kept = [torch.from_dlpack(folio.DeviceArray(context, (4,), 'f32'))]; kept += kept, work",
], ids=["plain", "cycle", "modules", "inside a call", "default", "capsule", "torch", "torch in a cycle"])
def test_the_interpreter_ends_cleanly(case: str) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT.replace("{case}", case)], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_child_process_computes(tmp_path: Path) -> None:
    """After fork() a child has the objects, and runs on one thread."""
    code = EXIT.replace("{case}", "import os; pid = os.fork(); out = plan.forward(q, k, k, cache=cache); "
                                  "assert (out == 1).all(); "
                                  "os._exit(0) if pid == 0 else sys.exit(os.waitpid(pid, 0)[1])")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
