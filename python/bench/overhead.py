"""What a call from Python costs beyond the C function that it runs.

usage: overhead.py [--device cpu|cuda] [--markdown]

A small decode, so that attention itself takes little: 4 sequences of 20 tokens, 4 query and 2 kv heads of 64, f32 (bf16
on a GPU). The C function is called through ctypes with arguments packed beforehand. Everything runs in one thread. Each
figure is the least of many short runs: CPU time of the thread, which other processes on the machine disturb least; on a
GPU the time of the host. A layer in compiled code is measured twice: one Layer object 11 times and once, difference /
10; and 8 Layers with caches of their own and one, difference / 7. A model has the second. The second layer of a step
is measured like that too.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import folio
import folio.torch
from folio import _run, plan as plan_module
from folio.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from folio.flashinfer import BatchDecodeWithPagedKVCacheWrapper

SEQS, LEN, HEADS, KV_HEADS, SIZE, BLOCK = 4, 20, 4, 2, 64, 16
LAYERS = 8


clock = time.thread_time  # perf_counter for a GPU


def least(call, seconds: float = 1.5) -> float:
    """Microseconds of one call: the least mean over runs of about 0.3 ms."""
    call()
    start = clock()
    call()
    count = max(1, int(3e-4 / max(clock() - start, 1e-7)))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        for _ in range(count):
            call()
        best = min(best, (clock() - start) / count)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return best * 1e6


class Case:
    """One step: caches, plan, tensors."""

    def __init__(self, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.context = folio.Context("cuda") if device == "cuda" else folio.Context(threads=1)
        blocks = SEQS * 2
        self.k_pages, self.v_pages = (torch.zeros(blocks, BLOCK, KV_HEADS, SIZE, dtype=dtype, device=device)
                                      for _ in range(2))
        self.cache = folio.KVCache.wrap([self.k_pages], [self.v_pages], context=self.context)
        self.attention = folio.Attention(self.context, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE,
                                         dtype=dtype)
        self.plan = folio.Plan(self.attention, max_seqs=SEQS, max_query_tokens=SEQS, max_seq_len=64, cache=self.cache)
        batch = folio.Batch(self.context, cache=self.cache)
        self.table = np.arange(blocks, dtype=np.int32).reshape(SEQS, 2)
        batch.set_block_tables(self.table, np.full(SEQS, LEN, np.int32))
        self.plan.update(batch)
        self.q, self.out = (torch.randn(SEQS, HEADS, SIZE, device=device).to(dtype) for _ in range(2))
        self.k, self.v = (torch.randn(SEQS, KV_HEADS, SIZE, device=device).to(dtype) for _ in range(2))
        step = folio.torch.Step(self.plan)
        self.layer = folio.torch.Layer(step, self.attention, self.cache, k_cache=self.k_pages, v_cache=self.v_pages)
        own = folio.KVCache(self.context, num_layers=LAYERS, num_blocks=blocks, block_size=BLOCK,
                            num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype)
        self.own = own
        self.layers = [folio.torch.Layer(step, self.attention, own, i) for i in range(LAYERS)]
        self.device, self.dtype = device, dtype

    def bare(self, cache: folio.KVCache, layer: int = 0):
        """The C function with packed arguments."""
        ctx, run = self.context, _run.run_of(self.context)
        fields = [x for tensor, name, heads in ((self.q, "q", HEADS), (self.k, "k", KV_HEADS), (self.v, "v", KV_HEADS),
                                                (self.out, "out", HEADS))
                  for x in _run.rows(ctx, tensor, name, heads, SIZE)[:5]]
        packed = plan_module._HEAD.pack(plan_module._HEAD.size, *fields, 0, 0, 0)
        call, plan, memory = plan_module.attention_forward, self.plan._handle, cache._handle
        return lambda: call(plan, 0, 0, memory, layer, packed, run)


def compiled(case: Case, layers: list) -> float:
    """Microseconds of one more of these layers in compiled code."""
    def took(some):
        def model(q, k, v):
            for layer in some:
                q = layer(q, k, v)
            return q
        torch._dynamo.reset()
        compiled_model = torch.compile(model, fullgraph=True)
        return least(lambda: compiled_model(case.q, case.k, case.v), 4.0)

    return (took(layers) - took(layers[:1])) / (len(layers) - 1)


def rows_of(case: Case):
    """(name, microseconds) of everything measured. A name that begins with "C:" is what the next ones are compared
    with."""
    c, plan, cache, layer = case, case.plan, case.cache, case.layer
    calls = [c.bare(c.own, i) for i in range(LAYERS)]
    yield "C: `folio_attention_forward`, 8 layers in turn", least(lambda: [call() for call in calls]) / LAYERS
    yield "`folio.torch.Layer`, in `torch.compile`, distinct", compiled(case, c.layers)
    yield "C: `folio_attention_forward`", least(c.bare(cache))
    yield "`Plan.forward`", least(lambda: plan.forward(c.q, c.k, c.v, cache=cache))
    yield "`Plan.forward` with a given `out`", least(lambda: plan.forward(c.q, c.k, c.v, cache=cache, out=c.out))
    yield "`folio.torch.Layer`, eager", least(lambda: layer(c.q, c.k, c.v))
    yield "`folio.torch.Layer`, in `torch.compile`, one object", compiled(case, [layer] * 11)
    if c.device == "cpu":
        starts, every = list(range(SEQS + 1)), np.full(SEQS, LEN, np.int32)
        yield "`folio.attend` over the same cache", least(lambda: folio.attend(
            c.q, c.k, c.v, cache=cache, block_tables=c.table, seq_lens=every, query_start=starts, context=c.context))
        yield "`folio.attend` without a cache", least(lambda: folio.attend(c.q, c.k, c.v, query_start=starts,
                                                                           context=c.context))
    with torch.inference_mode(False):  # as an engine keeps them; on a GPU, changes of others are not counted
        table = torch.from_numpy(c.table).to(c.device)
        lens = torch.full((SEQS,), LEN - 1, dtype=torch.int32, device=c.device)
        cu = torch.arange(SEQS + 1, dtype=torch.int32, device=c.device)
        others = [lens, lens - 1]
    q4, k4, v4 = c.q[:, None], c.k[:, None], c.v[:, None]
    pages = [(torch.zeros_like(c.k_pages), torch.zeros_like(c.v_pages)) for _ in range(LAYERS)]

    def cached(pages, lens=lens):
        flash_attn_with_kvcache(q4, *pages, k4, v4, cache_seqlens=lens, block_table=table, causal=True)

    def varlen(pages):
        flash_attn_varlen_func(c.q, *pages, cu, None, 1, LEN, causal=True, block_table=table, seqused_k=lens)

    for name, call in (("`flash_attn_with_kvcache`", cached), ("`flash_attn_varlen_func` over pages", varlen)):
        first = least(lambda: call(pages[0]))
        every = least(lambda: [call(x) for x in pages])
        yield name + ", from the second layer of a step on", (every - first) / (LAYERS - 1)
        yield name + ", the first layer", first
    steps = iter(range(10**9))
    yield "`flash_attn_with_kvcache`, new lengths", least(lambda: cached(pages[0], others[next(steps) % 2]))
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    indptr, last = torch.arange(SEQS + 1, dtype=torch.int32) * 2, torch.full((SEQS,), LEN - BLOCK, dtype=torch.int32)
    indices = torch.arange(SEQS * 2, dtype=torch.int32)
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, SIZE, BLOCK, q_data_type=c.dtype)
    yield "FlashInfer's `run`", least(lambda: wrapper.run(c.q, pages[0]))
    yield "FlashInfer's `plan`, once a step", least(lambda: wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, SIZE,
                                                                         BLOCK, q_data_type=c.dtype))
    if c.device == "cpu":
        q, k, v, out = (x.numpy() for x in (c.q, c.k, c.v, c.out))
        yield "`Plan.forward` with NumPy arrays", least(lambda: plan.forward(q, k, v, cache=cache, out=out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cuda":
        global clock
        clock = time.perf_counter
    with torch.inference_mode():
        base = 0.0
        print("| call | us | us over C |\n|---|---:|---:|" if options.markdown else
              f"{'call':52}{'us':>8}{'over C':>8}")
        for name, took in rows_of(Case(options.device)):
            base = took if name.startswith("C:") else base
            over = "" if took is base else f"{took - base:.1f}"
            print(f"| {name} | {took:.1f} | {over} |" if options.markdown else
                  f"{name:52}{took:8.1f}{over:>8}", flush=True)


if __name__ == "__main__":
    main()
