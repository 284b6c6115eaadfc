"""folio.flashinfer against float64 math: plan and run over both layouts, appending, merging, compiled."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from numpy_math import rotate
from torch_math import DTYPES, attention, check

import folio
from folio.flashinfer import (BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithPagedKVCacheWrapper,
                              BatchMLAPagedAttentionWrapper, BatchPrefillWithPagedKVCacheWrapper,
                              BatchPrefillWithRaggedKVCacheWrapper, MultiLevelCascadeAttentionWrapper,
                              append_paged_kv_cache, fast_decode_plan, get_batch_indices_positions, get_seq_lens,
                              merge_state, merge_state_in_place, merge_states, single_decode_with_kv_cache,
                              single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse)

NAN = float("nan")
LOG2E = math.log2(math.e)


def ints(values, device):
    return torch.tensor(list(values), dtype=torch.int32, device=device)


class Pages:
    """Sequences of keys in shuffled pages, filled by append_paged_kv_cache; unused slots hold NaN."""

    def __init__(self, device, lens, page=8, layout="NHD", joined=False, dtype=torch.float32, kv_heads=2, size=64):
        counts = [-(-n // page) for n in lens]
        total = sum(counts) + 2
        self.lens, self.page = lens, page
        self.indptr = ints(np.concatenate([[0], np.cumsum(counts)]), device)
        self.indices = ints(np.random.default_rng(1).permutation(total)[: sum(counts)], device)
        self.last = ints([n - (c - 1) * page if c else 0 for n, c in zip(lens, counts)], device)
        inner = (page, kv_heads, size) if layout == "NHD" else (kv_heads, page, size)
        both = torch.full((total, 2, *inner), NAN, device=device).to(dtype)
        self.cache = both if joined else (both[:, 0].clone(), both[:, 1].clone())
        self.keys = [torch.randn(n, kv_heads, size, device=device).to(dtype) for n in lens]
        self.values = [torch.randn(n, kv_heads, size, device=device).to(dtype) for n in lens]
        starts = ints(np.concatenate([[0], np.cumsum(lens)]), device)
        where = get_batch_indices_positions(starts, get_seq_lens(self.indptr, self.last, page), sum(lens))
        append_paged_kv_cache(torch.cat(self.keys), torch.cat(self.values), *where, self.cache, self.indices,
                              self.indptr, self.last, layout)

    def tables(self):
        return self.indptr, self.indices, self.last


def expected(q, starts, pages, **options):
    parts = [attention(q[a:b], k, v, **options) for a, b, k, v in zip(starts, starts[1:], pages.keys, pages.values)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) * LOG2E


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "pair"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(device, layout, joined, dtype):
    torch.manual_seed(1)
    pages = Pages(device, [1, 8, 9, 33], layout=layout, joined=joined, dtype=dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device), layout)
    wrapper.plan(*pages.tables(), 4, 2, 64, 8, q_data_type=dtype)
    q = torch.randn(4, 4, 64, device=device).to(dtype)
    out, lse = wrapper.run(q, pages.cache, return_lse=True)
    want, want_lse = expected(q, range(5), pages)
    check(out, want)
    check(lse, want_lse, "lse")
    target, state = torch.empty_like(q), torch.empty_like(lse)
    assert wrapper.run(q, pages.cache, out=target) is target and torch.equal(target, out)
    assert wrapper.run(q, pages.cache, lse=state, return_lse=True)[1] is state and torch.equal(state, lse)
    assert torch.equal(wrapper.run(q, pages.cache, lse=state.zero_()), out) and torch.equal(state, lse)


@pytest.mark.parametrize("options", [{}, {"window": (6, -1)}, {"soft_cap": 4.0, "scale": 0.2},
                                     {"sinks": torch.tensor([0.1, 2.0, -1.0, 0.0])}], ids=str)
def test_decode_options(device, options):
    torch.manual_seed(2)
    pages = Pages(device, [20, 3, 0, 41])
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*pages.tables(), 4, 2, 64, 8, window_left=options.get("window", (-1, -1))[0],
                 logits_soft_cap=options.get("soft_cap"), sm_scale=options.get("scale"), q_data_type=torch.float32)
    q, sinks = torch.randn(4, 4, 64, device=device), options.get("sinks")
    out, lse = wrapper.run(q, pages.cache, return_lse=True, sinks=None if sinks is None else sinks.to(device))
    want, want_lse = expected(q, range(5), pages, **options)
    check(out, want)
    check(lse, want_lse, "lse")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill(device, causal, window, layout):
    """Prompts, chunks, decodes, rows without keys, and more rows than keys."""
    torch.manual_seed(3)
    q_lens, k_lens = [5, 1, 3, 2, 9, 0], [5, 30, 17, 0, 4, 6]
    pages = Pages(device, k_lens, layout=layout, joined=True)
    starts = np.concatenate([[0], np.cumsum(q_lens)]).tolist()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(ints(starts, device), *pages.tables(), 4, 2, 64, 8, causal=causal, window_left=window,
                 q_data_type=torch.float32)
    q = torch.randn(starts[-1], 4, 64, device=device)
    out, lse = wrapper.run_return_lse(q, pages.cache)
    want, want_lse = expected(q, starts, pages, causal=causal, window=(window, -1))
    check(out, want)
    check(lse, want_lse, "lse")


def test_plans_change_and_serve_many_layers(device):
    torch.manual_seed(4)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    for lens in ([3, 9], [4, 10], [100, 1, 1, 5, 60], [2]):  # also beyond the limits of the first plan
        layers = [Pages(device, lens) for _ in range(2)]
        wrapper.plan(*layers[0].tables(), 4, 2, 64, 8, q_data_type=torch.float32)
        for pages in layers:
            q = torch.randn(len(lens), 4, 64, device=device)
            check(wrapper.run(q, pages.cache), expected(q, range(len(lens) + 1), pages)[0])


def test_fp8_scales(device):
    torch.manual_seed(5)
    pages = Pages(device, [9, 20])
    k_scale, v_scale = 0.5, 0.25
    fp8 = [x.nan_to_num(0).div(s).to(torch.float8_e4m3fn) for x, s in zip(pages.cache, (k_scale, v_scale))]
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*pages.tables(), 4, 2, 64, 8, q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn)
    q = torch.randn(2, 4, 64, device=device).bfloat16()
    out = wrapper.run(q, tuple(fp8), k_scale=k_scale, v_scale=v_scale)
    for i, n in enumerate([9, 20]):
        where = [pages.indices[pages.indptr[i] + t // 8].item() * 8 + t % 8 for t in range(n)]
        k, v = (x.float().flatten(0, 1)[where] * s for x, s in zip(fp8, (k_scale, v_scale)))
        check(out[i:i + 1], attention(q[i:i + 1], k, v)[0])


# ---- options of plan(): one table for all wrappers ----

HEADS = 6  # no power of two, which ALiBi's slopes depend on
SLOPES = torch.tensor([2 ** -2.0, 2 ** -4.0, 2 ** -6.0, 2 ** -8.0, 2 ** -1.0, 2 ** -3.0])
Q_LENS, K_LENS = [5, 1, 3, 9, 2, 0], [5, 30, 17, 4, 0, 6]


def masks_of(kind):
    """A mask [rows, keys] of each sequence."""
    draw = np.random.default_rng(3)
    shapes = list(zip(Q_LENS, K_LENS))
    if kind == "random":
        masks = [draw.random(shape) < 0.6 for shape in shapes]
        masks[2][1] = False  # a row that sees nothing
        return masks
    causal = [np.tri(*shape, shape[1] - shape[0], dtype=bool) for shape in shapes]
    return causal if kind == "causal" else [np.ones_like(m) if i % 2 else m for i, m in enumerate(causal)]


def packed(masks):
    return torch.from_numpy(np.concatenate([np.packbits(m.ravel(), bitorder="little") for m in masks]))


def flat(masks):
    return torch.from_numpy(np.concatenate([m.ravel() for m in masks]))


def expected_with(q, starts, keys, values, *, pos_encoding_mode="NONE", masks=None, rope_scale=1.0, rope_theta=1e4,
                  **options):
    """(out, lse to the base 2) in float64, with FlashInfer's formulas."""
    outs, states = [], []
    for i, (k, v) in enumerate(zip(keys, values)):
        mine = q[starts[i]:starts[i + 1]].double().cpu()
        k, v, rows, given = k.double().cpu(), v.double().cpu(), len(mine), dict(options)
        at = np.arange(rows) + len(k) - rows
        if pos_encoding_mode == "ROPE_LLAMA":
            mine, k = (torch.from_numpy(rotate(x.numpy(), p / rope_scale, x.shape[-1], rope_theta))
                       for x, p in ((mine, at), (k, np.arange(len(k)))))
        bias = np.zeros((q.shape[1], rows, len(k)))
        if pos_encoding_mode == "ALIBI":
            bias += SLOPES[:, None, None].numpy() * (np.arange(len(k)) - np.arange(rows)[:, None])
        if masks is not None:
            bias = np.where(masks[i], bias, -np.inf)
            given["causal"] = False
        out, lse = attention(mine, k, v, bias=bias, **given)
        outs.append(out)
        states.append(lse * LOG2E)
    return torch.cat(outs), torch.cat(states)


OPTIONS = {
    "alibi, causal": {"pos_encoding_mode": "ALIBI", "causal": True},
    "alibi, not causal": {"pos_encoding_mode": "ALIBI", "causal": False},
    "alibi, window": {"pos_encoding_mode": "ALIBI", "causal": True, "window": (6, -1)},
    "rotary": {"pos_encoding_mode": "ROPE_LLAMA", "causal": True},
    "rotary, scaled": {"pos_encoding_mode": "ROPE_LLAMA", "causal": False, "rope_scale": 4.0, "rope_theta": 5e5},
    "mask": {"masks": "random"},
    "mask, alibi": {"masks": "random", "pos_encoding_mode": "ALIBI"},
    "mask, window": {"masks": "random", "window": (6, -1), "scale": 0.2},
    "causal mask": {"masks": "causal"},
    "causal and full masks": {"masks": "mixed"},
    "cap, scale, window": {"soft_cap": 4.0, "scale": 0.2, "window": (6, -1), "causal": True},
}
NAMES = {"window": "window_left", "scale": "sm_scale", "soft_cap": "logits_soft_cap"}


def of_plan(options, pack):
    """The options of the table as plan() names them."""
    given = {NAMES.get(name, name): value[0] if name == "window" else value for name, value in options.items()}
    masks = given.pop("masks", None)
    if masks is not None:
        given |= {"packed_custom_mask": packed(masks)} if pack else {"custom_mask": flat(masks)}
    return given


def both_of(options):
    """(options as plan() names them, options of expected_with())."""
    if "masks" in options:
        options = options | {"masks": masks_of(options["masks"])}
    return of_plan(options, pack=len(options) > 1), {"causal": False} | options


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_options_of_prefill(device, name, layout):
    torch.manual_seed(8)
    given, options = both_of(OPTIONS[name])
    pages = Pages(device, K_LENS, layout=layout)
    starts = np.concatenate([[0], np.cumsum(Q_LENS)]).tolist()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(ints(starts, device), *pages.tables(), HEADS, 2, 64, 8, q_data_type=torch.float32, **given)
    assert (wrapper._extra is None) == (name in ("causal mask", "causal and full masks", "cap, scale, window"))
    q = torch.randn(starts[-1], HEADS, 64, device=device)
    out, lse = wrapper.run_return_lse(q, pages.cache)
    want, want_lse = expected_with(q, starts, pages.keys, pages.values, **options)
    check(out, want)
    check(lse, want_lse, "lse")


@pytest.mark.parametrize("name", [n for n in OPTIONS if "mask" not in n and "not causal" not in n])
@pytest.mark.parametrize("rows", [1, 3])
def test_options_of_decode(device, name, rows):
    """rows: q_len_per_req; the rows of a sequence are causal, whatever their number."""
    torch.manual_seed(9)
    options = {n: x for n, x in OPTIONS[name].items() if n != "causal"}
    pages = Pages(device, [9, 3, 33])
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*pages.tables(), HEADS, 2, 64, 8, q_data_type=torch.float32, q_len_per_req=rows,
                 **of_plan(options, False))
    q, starts = torch.randn(3 * rows, HEADS, 64, device=device), [i * rows for i in range(4)]
    out, lse = wrapper.run(q, pages.cache, return_lse=True, q_len_per_req=rows)
    want, want_lse = expected_with(q, starts, pages.keys, pages.values, causal=True, **options)
    check(out, want)
    check(lse, want_lse, "lse")


@pytest.mark.parametrize("given, kinds", [
    ({"data_type": torch.bfloat16}, (torch.float16, torch.bfloat16)),
    ({"data_type": torch.bfloat16, "q_data_type": None}, (torch.bfloat16, torch.bfloat16)),
    ({"data_type": torch.bfloat16, "kv_data_type": torch.float16}, (torch.float16, torch.float16)),
    ({"q_data_type": torch.float32}, (torch.float32, torch.float32)), ({}, (torch.float16, torch.float16))], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_data_type_fills_what_is_none(given, kinds, fast):
    """fast_decode_plan() has None where plan() has float16."""
    torch.manual_seed(10)
    if fast and given == {"data_type": torch.bfloat16}:
        kinds = (torch.bfloat16, torch.bfloat16)
    if fast and given == {"data_type": torch.bfloat16, "kv_data_type": torch.float16}:
        kinds = (torch.bfloat16, torch.float16)
    pages = Pages("cpu", [9, 20], dtype=kinds[1])
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    if fast:
        indptr, indices, last = pages.tables()
        wrapper.plan = functools.partial(fast_decode_plan, wrapper)  # as engines do
        wrapper.plan(indptr * 0, indices, last, 4, 2, 64, 8, non_blocking=True, global_override_indptr_cpu=indptr,
                     **given)
    else:
        wrapper.plan(*pages.tables(), 4, 2, 64, 8, **given)
    q = torch.randn(2, 4, 64).to(kinds[0])
    check(wrapper.run(q, pages.cache), expected(q, range(3), pages)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(None, 0.5, 3.0), (1.5, None, None), (0.7, 1.3, 0.25)], ids=str)
def test_scales_of_16_bit_caches(device, dtype, scales):
    """They change from layer to layer."""
    torch.manual_seed(11)
    pages = Pages(device, [9, 20], dtype=dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    q = torch.randn(2, 4, 64, device=device).to(dtype)
    for step in range(2):
        wrapper.plan(*pages.tables(), 4, 2, 64, 8, q_data_type=dtype, sm_scale=0.2)
        for q_scale, k_scale, v_scale in ((None, None, None), scales, (None, 1.0, None), scales):
            out, lse = wrapper.run(q, pages.cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)
            want, want_lse = expected(q, range(3), pages, scale=0.2 * (q_scale or 1) * (k_scale or 1))
            check(out, want * (v_scale or 1))
            check(lse, want_lse, "lse")


# ---- without pages ----


@pytest.mark.parametrize("name, k_lens", [
    (name, lens) for lens in (K_LENS, Q_LENS, [0] * 6, [8, 16, 8, 0, 24, 8]) for name in OPTIONS
    if lens is K_LENS or "masks" not in OPTIONS[name]], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged(device, name, layout, k_lens):
    torch.manual_seed(12)
    given, options = both_of(OPTIONS[name])
    starts, ends = ([0, *np.cumsum(lens).tolist()] for lens in (Q_LENS, k_lens))
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, layout)
    wrapper.plan(ints(starts, device), ints(ends, device), HEADS, 2, 64, 32, q_data_type=torch.float32, **given)
    q, k = torch.randn(starts[-1], HEADS, 64, device=device), torch.randn(ends[-1], 2, 64, device=device)
    v = torch.randn(ends[-1], 2, 32, device=device)
    k_given, v_given = (x.transpose(0, 1).contiguous() if layout == "HND" else x for x in (k, v))
    out, lse = wrapper.run_return_lse(q, k_given, v_given)
    cut = [[x[a:b] for a, b in zip(ends, ends[1:])] for x in (k, v)]
    want, want_lse = expected_with(q, starts, *cut, **options)
    check(out, want)
    check(lse, want_lse, "lse")


def test_ragged_in_buffers_of_one_size(device):
    """As a graph has them: longer than the step, which changes."""
    torch.manual_seed(19)
    k, v = torch.full((2, 60, 2, 64), NAN, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(use_cuda_graph=True)
    for lens in ([5, 30, 17], [3, 1, 2], [16, 8, 32]):
        starts, ends = [0, 3, 4, 6], [0, *np.cumsum(lens).tolist()]
        k[:ends[-1]], v[:ends[-1]] = torch.randn(2, ends[-1], 2, 64, device=device)
        wrapper.plan(ints(starts, device), ints(ends, device), HEADS, 2, 64, causal=True, q_data_type=torch.float32)
        made = wrapper._planned
        q = torch.randn(6, HEADS, 64, device=device)
        out = wrapper.run(q, k, v)
        assert made in (None, wrapper._planned)
        cut = [[x[a:b] for a, b in zip(ends, ends[1:])] for x in (k, v)]
        check(out, expected_with(q, starts, *cut, causal=True)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows, keys", [(3, 3), (1, 40), (5, 17), (7, 4)])
def test_single_prefill(device, layout, rows, keys):
    torch.manual_seed(13)
    q, mask = torch.randn(rows, HEADS, 64, device=device), torch.rand(rows, keys) < 0.7
    k, v = torch.randn(2, keys, 2, 64, device=device)
    k_given, v_given = (x.transpose(0, 1).contiguous() if layout == "HND" else x for x in (k, v))
    for given, options in (({"causal": True}, {"causal": True}), ({}, {"causal": False}),
                           ({"custom_mask": mask}, {"masks": [mask.numpy()]}),
                           ({"packed_custom_mask": packed([mask.numpy()])}, {"masks": [mask.numpy()]}),
                           ({"pos_encoding_mode": "ROPE_LLAMA", "causal": True},) * 2,
                           ({"k_scale": 0.5, "sm_scale": 0.3}, {"scale": 0.15, "causal": False})):
        want, want_lse = expected_with(q, [0, rows], [k], [v], **options)
        out, lse = single_prefill_with_kv_cache_return_lse(q, k_given, v_given, kv_layout=layout, **given)
        check(out, want)
        check(lse, want_lse, "lse")
        assert torch.equal(single_prefill_with_kv_cache(q, k_given, v_given, kv_layout=layout, **given), out)


@pytest.mark.parametrize("name", [n for n in OPTIONS if "mask" not in n and "not causal" not in n])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_decode(device, name, dtype):
    torch.manual_seed(14)
    options = {n: x for n, x in OPTIONS[name].items() if n != "causal"}
    q, (k, v) = torch.randn(HEADS, 64, device=device).to(dtype), torch.randn(2, 41, 2, 64, device=device).to(dtype)
    want, want_lse = expected_with(q[None], [0, 1], [k], [v], causal=True, **options)
    given = of_plan(options, False)
    mode = {"pos_encoding_mode": "NONE"} | given
    out, lse = single_decode_with_kv_cache(q, k, v, "NHD", mode.pop("pos_encoding_mode"), True, return_lse=True, **mode)
    check(out, want[0])
    check(lse.to(dtype) if "rotary" in name else lse, want_lse[0], "lse")  # what is rotated is rounded
    scale = options.get("scale", 1 / 8)
    want = expected_with(q[None], [0, 1], [k], [v], causal=True, **options | {"scale": scale * 1.5 * 0.5})[0] * 2
    check(single_decode_with_kv_cache(q, k, v, q_scale=1.5, k_scale=0.5, v_scale=2.0, **given), want[0])


# ---- sinks, levels, latents ----


def test_sinks(device):
    torch.manual_seed(15)
    pages, starts, sink = Pages(device, [20, 3, 0, 41]), [0, 4, 5, 6, 9], torch.tensor([0.1, 2.0, -1.0, 0.0])
    wrapper = BatchAttentionWithAttentionSinkWrapper(
        torch.empty(0, device=device), kv_layout="NHD", backend="fa2", q_data_type=torch.float32, head_dim_qk=64,
        kv_data_type=torch.float32, head_dim_vo=64, window_left=6)
    wrapper.plan(ints(starts, device), *pages.tables(), 4, 2, 64, 8, causal=True, window_left=6,
                 q_data_type=torch.float32)
    q = torch.randn(9, 4, 64, device=device)
    for scale in (0.2, 64 ** -0.5):
        out, lse = wrapper.run(q, pages.cache, sink.to(device), scale, return_lse=True)
        want, want_lse = expected(q, starts, pages, sinks=sink, window=(6, -1), scale=scale)
        check(out, want)
        check(lse, want_lse, "lse")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_levels(device, causal, layout):
    """A prompt of all, prompts of two groups, and each sequence's own keys, in one cache."""
    torch.manual_seed(16)
    shared, groups, own, rows = [16], [8, 24], [5, 9, 1], [2, 9, 1]
    pages = Pages(device, [*shared, *groups, *own], layout=layout)
    cuts = [(0, 1), (1, 3), (3, 6)]
    starts = [0, *np.cumsum(rows).tolist()]
    parts = [[0, starts[-1]], [0, starts[2], starts[3]], starts]
    tables = [[pages.indptr[a:b + 1] - pages.indptr[a], pages.indices[pages.indptr[a]:pages.indptr[b]],
               pages.last[a:b]] for a, b in cuts]
    wrapper = MultiLevelCascadeAttentionWrapper(3, None, layout)
    wrapper.plan([ints(p, device) for p in parts], *zip(*tables), 4, 2, 64, 8, causal=causal, sm_scale=0.2,
                 q_data_type=torch.float32)
    q = torch.randn(starts[-1], 4, 64, device=device)
    all_of = [(0, 1, 3), (0, 1, 4), (0, 2, 5)]
    keys, values = ([torch.cat([x[i] for i in part]) for part in all_of] for x in (pages.keys, pages.values))
    check(wrapper.run(q, pages.cache), expected_with(q, starts, keys, values, causal=causal, scale=0.2)[0])


@pytest.mark.parametrize("kpe_size", [16, 0])
@pytest.mark.parametrize("joined", [True, False], ids=["slices", "two tensors"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents(device, kpe_size, joined, causal, dtype):
    torch.manual_seed(17)
    page, size, rows, lens = 8, 64, [1, 3, 2], [9, 20, 2]
    layout = Pages(device, lens)
    both = torch.full((int(layout.indices.max()) + 3, page, size + kpe_size), NAN, device=device).to(dtype)
    ckv, kpe = both[..., :size], both[..., size:]
    if not joined:
        ckv, kpe = ckv.clone(), kpe.clone()
    latents = [torch.randn(n, size + kpe_size, device=device).to(dtype) for n in lens]
    for i, x in enumerate(latents):
        places = torch.arange(len(x), device=device)
        slots = layout.indices[layout.indptr[i] + places // page].long(), places % page
        ckv[slots], kpe[slots] = x[:, :size], x[:, size:]
    starts = [0, *np.cumsum(rows).tolist()]
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, device=device), backend="fa2")
    wrapper.plan(ints(starts, device), layout.indptr, layout.indices, ints(lens, device), 4, size, kpe_size, page,
                 causal, 0.1, dtype, dtype)
    q = torch.randn(starts[-1], 4, size + kpe_size, device=device).to(dtype)
    out, lse = wrapper.run(q[..., :size], q[..., size:], ckv, kpe, return_lse=True)
    want, want_lse = expected_with(q, starts, [x[:, None] for x in latents], [x[:, None, :size] for x in latents],
                                   causal=causal, scale=0.1)
    check(out, want)
    check(lse, want_lse, "lse")
    natural = wrapper.run(q[..., :size], q[..., size:], ckv, kpe, return_lse=True, return_lse_base_on_e=True)[1]
    check(natural, want_lse / LOG2E, "lse")
    assert torch.equal(wrapper.run(q[..., :size], q[..., size:], ckv, kpe), out)


def test_latents_of_8_bits(device):
    torch.manual_seed(18)
    layout = Pages(device, [9, 20])
    both = torch.randn(int(layout.indices.max()) + 1, 8, 80, device=device).to(torch.float8_e4m3fn)
    wrapper = BatchMLAPagedAttentionWrapper()
    wrapper.plan(ints(range(3), device), layout.indptr, layout.indices, ints([9, 20], device), 4, 64, 16, 8, False,
                 0.1, torch.bfloat16, torch.float8_e4m3fn)
    q = torch.randn(2, 4, 80, device=device).bfloat16()
    out = wrapper.run(q[..., :64], q[..., 64:], both[..., :64], both[..., 64:], ckv_scale=0.5, kpe_scale=0.5)
    rows = [both.float()[layout.indices[a:b].long()].flatten(0, 1)[:n] * 0.5
            for a, b, n in zip(layout.indptr, layout.indptr[1:], (9, 20))]
    check(out, expected_with(q, [0, 1, 2], [x[:, None] for x in rows], [x[:, None, :64] for x in rows], scale=0.1)[0])


def test_merge(device):
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 4, 64, device=device), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
    parts = [attention(q, k[a:b], v[a:b], causal=False) for a, b in ((0, 7), (7, 20), (20, 30))]
    outs, states = zip(*((o.float().to(device), (s * LOG2E).float().to(device)) for o, s in parts))
    want, want_lse = attention(q, k, v, causal=False)
    for out, state in (merge_states(torch.stack(outs, 1), torch.stack(states, 1)),
                       merge_state(*merge_state(outs[0], states[0], outs[1], states[1]), outs[2], states[2])):
        check(out, want)
        check(state, want_lse * LOG2E, "s")
    out, state = outs[0].clone(), states[0].clone()
    merge_state_in_place(out, state, outs[1], states[1], torch.tensor([True, False, True], device=device))
    both = merge_state(outs[0], states[0], outs[1], states[1])
    assert torch.equal(out[0], both[0][0]) and torch.equal(out[1], outs[0][1]) and torch.equal(state[2], both[1][2])


def test_bad_input(device):
    pages = Pages(device, [9, 20])
    q = torch.randn(2, 4, 64, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    argument, unsupported = folio.ArgumentError, folio.UnsupportedError

    def reject(kind, sentence, call, *arguments, **options):
        with pytest.raises(kind, match=sentence):
            call(*arguments, **options)

    indptr, indices, last = pages.tables()
    float32 = {"q_data_type": torch.float32}
    reject(argument, r"plan\(\) must be called before run\(\)", wrapper.run, q, pages.cache)
    reject(argument, "pos_encoding_mode is 'ROPE'", wrapper.plan, indptr, indices, last, 4, 2, 64, 8,
           pos_encoding_mode="ROPE")
    with pytest.raises(TypeError, match="has no argument 'indices'"):
        BatchDecodeWithPagedKVCacheWrapper(None, indices=indices)
    reject(argument, r"paged_kv_last_page_len\[1\] = 9 is outside \[1, 8\]", wrapper.plan, indptr, indices,
           ints([1, 9], device), 4, 2, 64, 8)
    reject(argument, "paged_kv_indptr ends at 5, but paged_kv_indices has 4 entries", wrapper.plan, indptr, indices[:4],
           last, 4, 2, 64, 8)
    reject(argument, "paged_kv_indptr must start at 0", wrapper.plan, indptr + 1, indices, last, 4, 2, 64, 8)
    reject(unsupported, "jit_args", BatchDecodeWithPagedKVCacheWrapper, jit_args=[1])
    reject(argument, "kv_layout is 'NDH'", BatchDecodeWithPagedKVCacheWrapper, None, "NDH")
    wrapper.plan(indptr, indices, last, 4, 2, 64, 8, **float32)
    reject(argument, r"the paged KV cache has shape", wrapper.run, q, pages.cache[0])
    reject(unsupported, "k_scale has shape .2,.; it must be one number", wrapper.run, q, pages.cache,
           k_scale=torch.ones(2))
    reject(argument, "q has shape", wrapper.run, q[:, :3], pages.cache)
    reject(unsupported, r"run\(\) does not support window_left=3", wrapper.run, q, pages.cache, window_left=3)
    wrapper.run(q, pages.cache, window_left=-1, q_len_per_req=1, enable_pdl=True)  # as in plan()
    reject(unsupported, r"plan\(\) does not support token_pos_in_items_ptr", wrapper.plan, indptr, indices, last, 4, 2,
           64, 8, token_pos_in_items_ptr=last)
    reject(unsupported, "o_data_type is float16; out has the dtype of q, float32", wrapper.plan, indptr, indices, last,
           4, 2, 64, 8, **float32, o_data_type=torch.float16)
    prefill = BatchPrefillWithPagedKVCacheWrapper()
    two = ints([0, 1, 2], device)
    reject(argument, "the custom mask has 28 entries; it must have 29", prefill.plan, two, indptr, indices, last, 4, 2,
           64, 8, custom_mask=torch.ones(28, dtype=torch.bool))
    reject(argument, "the custom mask has 32 entries; it must have 40, .* in whole bytes", prefill.plan, two, indptr,
           indices, last, 4, 2, 64, 8, packed_custom_mask=torch.ones(4, dtype=torch.uint8))
    for options in ({"logits_soft_cap": 5.0}, {"window_left": 3}):
        reject(unsupported, "'ALIBI' is supported without logits_soft_cap, and with window_left only if causal",
               prefill.plan, ints([0, 4, 6], device), indptr, indices, last, 4, 2, 64, 8, pos_encoding_mode="ALIBI",
               **options)
    prefill.plan(two, indptr, indices, last, 4, 2, 64, 8, pos_encoding_mode="ALIBI", q_data_type=torch.float32)
    reject(unsupported, "sinks are not supported with pos_encoding_mode 'ALIBI'", prefill.run, q, pages.cache,
           sinks=torch.zeros(4, device=device))
    reject(unsupported, "'ROPE_LLAMA' is not supported with 8-bit caches", prefill.plan, two, indptr, indices, last, 4,
           2, 64, 8, pos_encoding_mode="ROPE_LLAMA", kv_data_type=torch.float8_e4m3fn)
    prefill.plan(two, indptr, indices - 1, last, 4, 2, 64, 8, pos_encoding_mode="ROPE_LLAMA", q_data_type=torch.float32)
    reject(argument, r"paged_kv_indices must be in \[0, 7\)", prefill.run, q, pages.cache)
    ragged = BatchPrefillWithRaggedKVCacheWrapper()
    reject(argument, r"plan\(\) must be called before run\(\)", ragged.run, q, q, q)
    ragged.plan(two, two, 4, 4, 64, q_data_type=torch.float32)
    reject(argument, r"v has shape .*; it must have 3 dims", ragged.run, q, q, q[0])
    reject(unsupported, r"plan\(\) does not support scale_q; it supports causal, ", single_prefill_with_kv_cache, q,
           q, q, scale_q=2.0)
    cascade = MultiLevelCascadeAttentionWrapper(2)
    reject(unsupported, "levels are supported without window_left", cascade.plan, [two] * 2, [indptr] * 2,
           [indices] * 2, [last] * 2, 4, 2, 64, 8, window_left=4)
    mla = BatchMLAPagedAttentionWrapper()
    mla.plan(two, indptr, indices, ints([9, 20], device), 4, 56, 8, 8, False, 0.1, torch.float32, torch.float32)
    ckv = torch.zeros(7, 8, 64, device=device)
    reject(unsupported, "only a ckv_scale and the same kpe_scale", mla.run, q[..., :56], q[..., 56:], ckv[..., :56],
           ckv[..., 56:], ckv_scale=2.0, kpe_scale=2.0)
    reject(argument, "qo_indptr has 2 entries, but there are 2 sequences of keys", prefill.plan, ints([0, 2], device),
           indptr, indices, last, 4, 2, 64, 8)
    if device == "cpu":  # a GPU's numbers are not looked at
        reject(argument, r"positions\[0\] = 16 is outside of the pages of sequence 0", append_paged_kv_cache, q[:1, :2],
               q[:1, :2], ints([0], device), ints([16], device), pages.cache, indices, indptr, last)


@pytest.mark.slow
def test_compiled_equals_eager(device):
    torch.manual_seed(7)
    pages = Pages(device, [8, 20], joined=True)
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    starts = ints([0, 2, 5], device)
    wrapper.plan(starts, *pages.tables(), 4, 2, 64, 8, causal=True, q_data_type=torch.float32)
    where = ints([0, 1], device), ints([7, 19], device)

    masked, ragged, latent = (kind() for kind in (BatchPrefillWithPagedKVCacheWrapper,
                                                  BatchPrefillWithRaggedKVCacheWrapper, BatchMLAPagedAttentionWrapper))
    masked.plan(starts, *pages.tables(), 4, 2, 64, 8, pos_encoding_mode="ROPE_LLAMA", q_data_type=torch.float32,
                custom_mask=torch.arange(2 * 8 + 3 * 20) % 3 > 0)
    ragged.plan(starts, ints([0, 1, 2], device), 4, 2, 64, q_data_type=torch.float32)
    latent.plan(starts, pages.indptr, pages.indices, ints([8, 20], device), 4, 48, 16, 8, True, 0.1, torch.float32,
                torch.float32)

    def model(q, k, v, cache):
        append_paged_kv_cache(k, v, *where, cache, pages.indices, pages.indptr, pages.last)
        out, lse = wrapper.run(q * 2, cache, return_lse=True)
        merged = merge_state(out, lse, out + 1, lse)
        rows = cache[:, 0, :, 0]
        return (merged[0] * 2, merged[1], wrapper.run(q, cache), wrapper.run(q, cache, k_scale=0.5, v_scale=2.0),
                *masked.run_return_lse(q, cache), *ragged.run_return_lse(q, k, v),
                *latent.run_return_lse(q[..., :48], q[..., 48:], rows[..., :48], rows[..., 48:]))

    q, k, v = torch.randn(5, 4, 64, device=device), *torch.randn(2, 2, 2, 64, device=device)
    with torch.no_grad():
        want = model(q, k, v, pages.cache.clone())
        got = torch.compile(model, fullgraph=True)(q, k, v, pages.cache)
    for a, b in zip(got, want):
        check(a, b.double().cpu())
    assert torch.equal(pages.cache[pages.indices[0], 0, 7], k[0])


@pytest.mark.slow
def test_opcheck(device):
    pages = Pages(device, [8, 20])
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*pages.tables(), 4, 2, 64, 8, q_data_type=torch.float32)
    q, ops = torch.randn(2, 4, 64, device=device), torch.ops.folio
    torch.library.opcheck(ops.flashinfer_run.default, (q, *pages.cache, 0.0, 0.0, 0.0, None, wrapper._key, True))
    torch.library.opcheck(ops.append_paged_kv_cache.default,
                          (q[:, :2], q[:, 2:], ints([0, 1], device), ints([7, 3], device),
                           *(x.nan_to_num(0) for x in pages.cache), pages.indices, pages.indptr, False))
    state = torch.randn(2, 4, device=device)
    torch.library.opcheck(ops.merge_base2.default, ([q, q + 1], [state, state]))


def test_cuda_graph(device):
    """A captured run is replayed after another plan()."""
    if device != "cuda":
        pytest.skip("host backends have no graphs")
    steps = [Pages(device, lens, dtype=torch.bfloat16) for lens in ([20, 33], [1, 40], [8, 9])]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, paged_kv_indices_buffer=ints(range(16), device))
    q = torch.randn(2, 4, 64, device=device).bfloat16()
    cache = tuple(torch.zeros_like(x[:8]).repeat(2, 1, 1, 1) for x in steps[0].cache)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for pages in steps:
            for mine, its in zip(cache, pages.cache):
                mine.zero_()[: its.shape[0]].copy_(its.nan_to_num(0))
            wrapper.plan(*pages.tables(), 4, 2, 64, 8, q_data_type=torch.bfloat16)
            if pages is steps[0]:
                wrapper.run(q, cache)
                with torch.cuda.graph(graph, stream=stream):
                    out = wrapper.run(q, cache)
            graph.replay()
            torch.cuda.synchronize()
            check(out, expected(q, range(3), pages)[0])


def test_dtypes_of_plan_are_named():
    pages = torch.zeros(2, 2, 16, 2, 64)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), 2, 2, 64, 16)
    with pytest.raises(folio.ArgumentError, match="q has dtype float32, but q_data_type of plan.. was float16"):
        wrapper.run(torch.zeros(1, 2, 64), pages)
    with pytest.raises(folio.ArgumentError, match="cache has dtype float32, but kv_data_type of plan.. was float16"):
        wrapper.run(torch.zeros(1, 2, 64, dtype=torch.float16), pages)


def test_gradients_are_refused():
    pages, q = torch.zeros(2, 2, 16, 2, 64), torch.zeros(1, 2, 64, requires_grad=True)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), 2, 2, 64, 16, q_data_type=torch.float32)
    with pytest.raises(folio.UnsupportedError, match="no backward pass"):
        wrapper.run(q, pages)
    with torch.no_grad():
        wrapper.run(q, pages)
