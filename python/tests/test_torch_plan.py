"""Plan.forward with torch tensors: results, strides, options, bad input, threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from torch_math import DTYPES, attention, check

import folio


class Step:
    """A batch of sequences with K and V in shuffled blocks of a cache. Slots past the lengths hold NaN."""

    def __init__(self, context, device, lens, dtype=torch.float32, heads=4, kv_heads=2, size=64, v_size=None, block=16,
                 layout="native", **options):
        torch.manual_seed(len(lens))
        self.device, self.lens, v_size = device, lens, v_size or size
        blocks = sum(-(-total // block) for _, total in lens) + 3
        self.cache = folio.KVCache(context, num_blocks=blocks, block_size=block, num_kv_heads=kv_heads, head_size=size,
                                   v_head_size=v_size, dtype=dtype, layout=layout)
        self.attention = folio.Attention(context, num_heads=heads, num_kv_heads=kv_heads, head_size=size,
                                         v_head_size=v_size, dtype=dtype, **options)
        order = np.random.default_rng(3).permutation(blocks).tolist()
        rows = sum(n for n, _ in lens)
        self.plan = folio.Plan(self.attention, max_seqs=len(lens), max_query_tokens=rows,
                               max_seq_len=max(total for _, total in lens), cache=self.cache)
        self.batch = folio.Batch(context, cache=self.cache)
        filler = torch.full((blocks * block, kv_heads, size), float("nan"), dtype=dtype, device=device)
        self.cache.write(0, filler, filler[..., :v_size] if v_size <= size else filler.new_full(
            (blocks * block, kv_heads, v_size), float("nan")), np.arange(blocks * block))
        self.k = [torch.randn(total, kv_heads, size, device=device).to(dtype) for _, total in lens]
        self.v = [torch.randn(total, kv_heads, v_size, device=device).to(dtype) for _, total in lens]
        self.q = torch.randn(rows, heads, size, device=device).to(dtype)
        for (n, total), k, v in zip(lens, self.k, self.v):
            table = [order.pop() for _ in range(-(-total // block))]
            slots = np.array([table[i // block] * block + i % block for i in range(total - n)], np.int64)
            self.cache.write(0, k[: total - n], v[: total - n], slots)
            self.batch.add(n, total, table)
        self.plan.update(self.batch)

    def new(self):
        """k and v of the step's rows."""
        return (torch.cat([a[total - n:] for a, (n, total) in zip(self.k, self.lens)]),
                torch.cat([a[total - n:] for a, (n, total) in zip(self.v, self.lens)]))

    def expected(self, **options):
        parts, row = [], 0
        for (n, _), k, v in zip(self.lens, self.k, self.v):
            parts.append(attention(self.q[row:row + n], k, v, **options))
            row += n
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


LENS = [(1, 17), (3, 3), (5, 40), (1, 1), (16, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["native", "nhd", "hnd"])
def test_forward(context, device, dtype, layout):
    step = Step(context, device, LENS, dtype, layout=layout)
    out, lse = step.plan.forward(step.q, *step.new(), cache=step.cache, lse=True)
    want, want_lse = step.expected()
    check(out, want)
    check(lse, want_lse, "lse")
    assert out.dtype == dtype and lse.dtype == torch.float32


def test_forward_of_joined_heads_and_given_out(context, device):
    step = Step(context, device, LENS)
    k, v = step.new()
    out = torch.full((step.q.shape[0], 4 * 64), 7.0, device=device)
    assert step.plan.forward(step.q.flatten(1), k.flatten(1), v.flatten(1), cache=step.cache, out=out) is out
    check(out.view(-1, 4, 64), step.expected()[0])
    assert step.plan.forward(step.q.flatten(1), k, v, cache=step.cache).shape == out.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_of_fused_qkv(context, device, dtype):
    step = Step(context, device, LENS, dtype)
    k, v = step.new()
    fused = torch.cat([step.q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    q, k, v = fused[:, :256].unflatten(1, (4, 64)), fused[:, 256:384], fused[:, 384:].unflatten(1, (2, 64))
    out = step.plan.forward(q, k, v, cache=step.cache)
    assert out.is_contiguous()
    check(out, step.expected()[0])


def test_forward_of_heads_before_tokens(context, device):
    step = Step(context, device, LENS)
    q = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty(4, q.shape[0], 64, device=device).transpose(0, 1)
    step.plan.forward(q, *step.new(), cache=step.cache, out=out)
    check(out, step.expected()[0])


def test_options(context, device):
    step = Step(context, device, LENS, soft_cap=5.0, window=(7, 0), scale=0.3)
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    out, lse = step.plan.forward(step.q, *step.new(), cache=step.cache, slopes=slopes, sinks=sinks, lse=True)
    want, want_lse = step.expected(soft_cap=5.0, window=(7, 0), scale=0.3, slopes=slopes, sinks=sinks)
    check(out, want)
    check(lse, want_lse, "lse")


def test_bias_may_be_expanded(context, device):
    step = Step(context, device, [(3, 20), (2, 9)])
    bias = torch.full((20,), 0.0, device=device)
    bias[0] = -float("inf")  # nobody sees the first key
    out = step.plan.forward(step.q, *step.new(), cache=step.cache, bias=bias.expand(2, 4, 3, 20))
    row = 0
    for (n, total), k, v in zip(step.lens, step.k, step.v):
        check(out[row:row + n], attention(step.q[row:row + n], k[1:], v[1:])[0])
        row += n


def test_value_heads_of_another_size(context, device):
    step = Step(context, device, LENS, size=64, v_size=32)
    out = step.plan.forward(step.q, *step.new(), cache=step.cache)
    assert out.shape == (step.q.shape[0], 4, 32)
    check(out, step.expected()[0])


def test_bad_tensors_are_rejected_and_nothing_is_written(context, device):
    step = Step(context, device, [(1, 5)])
    k, v = step.new()
    out = torch.full_like(step.q, 7.0)

    def reject(sentence, *tensors, **options):
        with pytest.raises(folio.ArgumentError, match=sentence):
            step.plan.forward(*tensors, cache=step.cache, **{"out": out, **options})
        assert (out == 7.0).all()

    reject(r"q has shape \(1, 3, 64\); it must be \[tokens, 4, 64\] or \[tokens, 256\]", step.q[:, :3], k, v)
    reject("k has dtype int64", step.q, k.long(), v)
    reject("elements apart", step.q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    reject("v has strides", step.q, k, v[:, :1].expand(1, 2, 64))  # also for a single token
    reject("k has strides", step.q, k[:, :1].expand(1, 2, 64), v)
    reject("attention 1 is outside", step.q, k, v, attention=1)
    reject("attention -1 is outside", step.q, k, v, attention=-1)
    reject("positions are given without rotary", step.q, k, v, positions=torch.zeros(1, dtype=torch.int64))
    reject("lse has dtype", step.q, k, v, lse=torch.empty(1, 4, dtype=torch.float64, device=device))
    reject("lse has strides", step.q, k, v, lse=torch.empty(1, 1, device=device).expand(1, 4))
    reject("slopes has dtype", step.q, k, v, slopes=torch.zeros(3, device=device))
    reject("dtype", step.q.half(), k, v)
    reject("is on meta", step.q.to("meta"), k, v)
    if device == "cuda":
        reject("q is on cpu:0, but the context is on cuda:0", step.q.cpu(), k, v)


def test_repeated_heads_are_rejected(context, device):
    step = Step(context, device, [(3, 5)])
    k, v = step.new()
    with pytest.raises(folio.ArgumentError, match="k has strides"):
        step.plan.forward(step.q, k[:, :1].expand(3, 2, 64), v, cache=step.cache)
    with pytest.raises(folio.ArgumentError, match="k has strides"):
        step.plan.forward(step.q, k[:1].expand(3, 2, 64), v, cache=step.cache)


def test_bad_numpy_arrays_are_rejected():
    q = np.zeros((2, 4, 64), np.float32)
    with pytest.raises(folio.ArgumentError, match="in the order of other machines"):
        folio.attend(q.astype(">f4"), q, q)
    records = np.zeros((2, 4, 64), np.dtype([("a", np.float32), ("b", np.int8)]))
    with pytest.raises(folio.ArgumentError, match="not multiples"):
        folio.attend(records["a"], q, q)


def test_numbers_that_do_not_fit_their_c_type_are_rejected():
    with pytest.raises(folio.ArgumentError, match="num_heads = 4294967300 is outside"):
        folio.Attention(num_heads=2**32 + 4, head_size=64)


def test_closed_objects_are_rejected(context, device):
    step = Step(context, device, [(1, 5)])
    step.cache.close()
    with pytest.raises(folio.ArgumentError, match="this KVCache is closed"):
        step.plan.forward(step.q, *step.new(), cache=step.cache)
    step.plan.close()
    with pytest.raises(folio.ArgumentError, match="this Plan is closed"):
        step.plan.forward(step.q, *step.new())


def test_objects_may_go_in_any_order(context, device):
    step = Step(context, device, [(1, 5), (4, 20)])
    plan, cache, q, new, want = step.plan, step.cache, step.q, step.new(), step.expected()[0]
    del step  # attention and batch live on in the plan
    gc.collect()
    check(plan.forward(q, *new, cache=cache), want)


def test_threads_run_one_plan_with_workspaces_of_their_own(context, device):
    step = Step(context, device, [(1, 400), (16, 300)])
    k, v = step.new()
    want = step.plan.forward(step.q, k, v, cache=step.cache)
    failures = []

    def work():
        try:
            workspace = step.plan.new_workspace()
            for _ in range(50):
                out = step.plan.forward(step.q, cache=step.cache, workspace=workspace)
                if not torch.equal(out, want):
                    failures.append("another result")
        except Exception as error:  # a thread's exception would only be printed
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_merge_states_checks_lse(context, device):
    out, lse = torch.zeros(3, 4, 64, device=device), torch.zeros(3, 4, device=device)
    merged, merged_lse = folio.merge_states([(out, lse), (out + 2, lse)], context=context)
    assert torch.equal(merged.cpu(), torch.ones(3, 4, 64)) and torch.allclose(merged_lse.cpu(), torch.tensor(2.0).log())
    with pytest.raises(folio.ArgumentError, match="lse of part 1 has strides"):
        folio.merge_states([(out, lse), (out, lse[:1].expand(3, 4))], context=context)
    with pytest.raises(folio.ArgumentError, match="lse of part 0 is on meta"):
        folio.merge_states([(out, lse.to("meta"))], context=context)
