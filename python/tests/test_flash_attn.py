"""folio.flash_attn against float64 math: torch on CPU and GPU, NumPy, and compiled."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_math import DTYPES, attention, check

import folio
from folio import _oneshot
from folio import flash_attn as package
from folio.attention import Geometry
from folio.flash_attn import bert_padding, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from folio.flash_attn.layers.rotary import apply_rotary_emb

NAN = float("nan")


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts_of(lens, device):
    return ints(np.concatenate([[0], np.cumsum(lens)]).tolist(), device)


def rows(total, heads, size, device, dtype=torch.float32):
    return torch.randn(total, heads, size, device=device).to(dtype)


def split(x, lens):
    return list(torch.split(x, list(lens)))


def expected(qs, ks, vs, **options):
    parts = [attention(q, k, v, **options) for q, k, v in zip(qs, ks, vs)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).T


OPTIONS = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": (5, -1)},
    {"causal": False, "window": (3, 2)},
    {"causal": False, "window": (-1, 4)},
    {"causal": True, "soft_cap": 3.0, "scale": 0.5},
    {"causal": True, "slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    {"causal": False, "slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"causal": False, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


def flash(options, device):
    """The same options by FlashAttention's names."""
    names = {"window": "window_size", "soft_cap": "softcap", "scale": "softmax_scale", "slopes": "alibi_slopes",
             "sinks": "s_aux"}
    return {names.get(n, n): v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}


Q_LENS, SAME, LONGER, SHORTER = [3, 0, 17, 1, 40], [3, 0, 17, 1, 40], [5, 2, 33, 70, 40], [2, 4, 0, 1, 9]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k_lens", [SAME, LONGER, SHORTER], ids=["same", "longer", "shorter"])
def test_varlen(device, options, k_lens):
    torch.manual_seed(1)
    q, k, v = (rows(sum(n), h, 64, device) for n, h in ((Q_LENS, 4), (k_lens, 2), (k_lens, 2)))
    # more queries than keys are announced to a GPU by max_seqlen_q > max_seqlen_k
    out, lse = flash_attn_varlen_func(q, k, v, starts_of(Q_LENS, device), starts_of(k_lens, device), 40, max(k_lens),
                                      return_softmax_lse=True, **flash(options, device))
    want, want_lse = expected(split(q, Q_LENS), split(k, k_lens), split(v, k_lens), **options)
    check(out, want)
    check(lse, want_lse, "lse")


class Pages:
    """K and V of sequences in shuffled pages; unused slots hold NaN."""

    def __init__(self, device, lens, page, kv_heads=2, size=64, dtype=torch.float32, spare=0):
        generator = np.random.default_rng(5)
        counts = [-(-(n + spare) // page) for n in lens]
        order = generator.permutation(sum(counts) + 2).tolist()
        self.k = torch.full((sum(counts) + 2, page, kv_heads, size), NAN, device=device).to(dtype)
        self.v = self.k.clone()
        self.keys = [rows(n, kv_heads, size, device, dtype) for n in lens]
        self.values = [rows(n, kv_heads, size, device, dtype) for n in lens]
        table = np.full((len(lens), max(counts + [1])), -1, np.int32)
        for i, n in enumerate(lens):
            for j in range(counts[i]):
                table[i, j] = order.pop()
            for t in range(n):
                self.k[table[i, t // page], t % page] = self.keys[i][t]
                self.v[table[i, t // page], t % page] = self.values[i][t]
        self.table = torch.from_numpy(table).to(device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k_lens", [LONGER, SHORTER], ids=["longer", "shorter"])
def test_varlen_paged(device, options, k_lens):
    torch.manual_seed(2)
    q, pages = rows(sum(Q_LENS), 4, 64, device), Pages(device, k_lens, 16)
    out, lse = flash_attn_varlen_func(q, pages.k, pages.v, starts_of(Q_LENS, device), starts_of(k_lens, device), 40,
                                      max(k_lens), block_table=pages.table, return_softmax_lse=True,
                                      **flash(options, device))
    want, want_lse = expected(split(q, Q_LENS), pages.keys, pages.values, **options)
    check(out, want)
    check(lse, want_lse, "lse")
    again = flash_attn_varlen_func(q, pages.k, pages.v, starts_of(Q_LENS, device), None, 40, max(k_lens),
                                   block_table=pages.table, seqused_k=ints(k_lens, device), **flash(options, device))
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)], ids=str)
def test_varlen_dtypes_and_groups(device, dtype, heads):
    torch.manual_seed(3)
    lens = [9, 30]
    q, k, v = (rows(39, h, 128, device, dtype) for h in (heads[0], heads[1], heads[1]))
    cu = starts_of(lens, device)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, causal=True)
    check(out, expected(split(q, lens), split(k, lens), split(v, lens))[0])
    assert out.dtype == dtype


def test_varlen_of_fused_qkv(device):
    torch.manual_seed(4)
    fused = torch.randn(23, 8, 64, device=device)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    cu = starts_of([11, 12], device)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, causal=True)
    check(out, expected(split(q, [11, 12]), split(k, [11, 12]), split(v, [11, 12]))[0])
    ck = starts_of([8, 15], device)  # strided keys through blocks
    out = flash_attn_varlen_func(q, k, v, starts_of([2, 15], device), ck, 15, 15, causal=True)
    check(out[:17], expected(split(q[:17], [2, 15]), split(k, [8, 15]), split(v, [8, 15]))[0])


def test_varlen_writes_into_out_and_returns_probs_as_none(device):
    torch.manual_seed(5)
    q, k, v = (rows(6, 2, 64, device) for _ in range(3))
    cu = starts_of([6], device)
    target = torch.full_like(q, NAN)
    out, lse, probs = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, return_attn_probs=True, out=target)
    assert out is target and probs is None
    want = expected([q], [k], [v], causal=False)
    check(out, want[0])
    check(lse, want[1], "lse")


def test_keys_far_apart_in_one_long_row(device):
    """More keys than a block may hold, and a length without divisors."""
    torch.manual_seed(6)
    for keys in (4097 * 2, 5003):
        q, k, v = rows(2, 2, 64, device), rows(keys, 2, 64, device), rows(keys, 2, 64, device)
        out = flash_attn_varlen_func(q, k, v, starts_of([2], device), starts_of([keys], device), 2, keys, causal=True)
        check(out, attention(q, k, v)[0])
        out = flash_attn_func(q[None], k[None], v[None], causal=True)
        check(out[0], attention(q, k, v)[0])


def test_block_sizes_are_the_largest_that_fit():
    assert [_oneshot.block_of(n) for n in (0, 1, 7, 4096, 8192, 4097 * 2, 5003, 12288)] == [1, 1, 7, 4096, 4096, 482, 1,
                                                                                        4096]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lens", [(5, 5), (3, 11), (7, 2)], ids=str)
def test_fixed(device, options, lens):
    torch.manual_seed(7)
    q = torch.randn(3, lens[0], 4, 64, device=device)
    k, v = torch.randn(2, 3, lens[1], 2, 64, device=device)
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True, **flash(options, device))
    for i in range(3):
        want, want_lse = attention(q[i], k[i], v[i], **options)
        check(out[i], want)
        check(lse[i], want_lse.T, "lse")


def test_fixed_of_slices(device):
    torch.manual_seed(8)
    qkv = torch.randn(2, 6, 3, 4, 64, device=device)
    q, k, v = qkv.unbind(2)
    for a, b in ((q, k), (q[:, 2:4], k), (q, k[:, :4])):
        out = flash_attn_func(a, b, v[:, : b.shape[1]], causal=True)
        for i in range(2):
            check(out[i], attention(a[i], b[i], v[i, : b.shape[1]])[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("new", [0, 1, 3], ids=["read", "one", "three"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache(device, options, new, paged):
    torch.manual_seed(9)
    before = [7, 0, 20] if new else [7, 4, 20]
    queries = new or 2
    q = torch.randn(3, queries, 4, 64, device=device)
    k, v = torch.randn(2, 3, new, 2, 64, device=device) if new else (None, None)
    if paged:
        pages = Pages(device, before, 4, spare=new)
        k_cache, v_cache, table, keys, values = pages.k, pages.v, pages.table, pages.keys, pages.values
    else:
        k_cache, v_cache = torch.full((2, 3, 32, 2, 64), NAN, device=device).unbind(0)
        table, keys, values = None, [rows(n, 2, 64, device) for n in before], [rows(n, 2, 64, device) for n in before]
        for i, n in enumerate(before):
            k_cache[i, :n], v_cache[i, :n] = keys[i], values[i]
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints(before, device), block_table=table,
                                       return_softmax_lse=True, **flash(options, device))
    for i, n in enumerate(before):
        full_k = torch.cat([keys[i], k[i]]) if new else keys[i]
        full_v = torch.cat([values[i], v[i]]) if new else values[i]
        want, want_lse = attention(q[i], full_k, full_v, **options)
        check(out[i], want)
        check(lse[i], want_lse.T, "lse")
        for t in range(n + new):  # what was stored, and nothing else was
            at = (table[i, t // 4], t % 4) if paged else (i, t)
            assert torch.equal(k_cache[at], full_k[t]) and torch.equal(v_cache[at], full_v[t])
    assert torch.isfinite(k_cache).sum() == sum(n + new for n in before) * 2 * 64


def test_with_kvcache_batch_index_and_one_length(device):
    torch.manual_seed(10)
    k_cache, v_cache = torch.randn(2, 5, 24, 2, 64, device=device)
    q = torch.randn(3, 1, 4, 64, device=device)
    index = [4, 0, 2]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, cache_batch_idx=ints(index, device))
    for i, row in enumerate(index):
        check(out[i], attention(q[i], k_cache[row, :9], v_cache[row, :9])[0])
    out = flash_attn_with_kvcache(q, k_cache[:3], v_cache[:3])  # no lengths: all of the cache
    for i in range(3):
        check(out[i], attention(q[i], k_cache[i], v_cache[i])[0])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_more_new_tokens_than_queries(device, paged):
    torch.manual_seed(11)
    q, new = torch.randn(2, 1, 4, 64, device=device), torch.randn(2, 2, 5, 2, 64, device=device)
    before = [3, 6]
    if paged:
        pages = Pages(device, before, 4, spare=5)
        caches, table, keys, values = (pages.k, pages.v), pages.table, pages.keys, pages.values
    else:
        caches = torch.randn(2, 2, 12, 2, 64, device=device).unbind(0)
        table, keys, values = None, [caches[0][i, :n].clone() for i, n in enumerate(before)], \
            [caches[1][i, :n].clone() for i, n in enumerate(before)]
    out = flash_attn_with_kvcache(q, *caches, new[0], new[1], cache_seqlens=ints(before, device), block_table=table,
                                  causal=True)
    for i in range(2):
        check(out[i], attention(q[i], torch.cat([keys[i], new[0, i]]), torch.cat([values[i], new[1, i]]))[0])


def test_with_kvcache_rows_of_several_blocks(device):
    """Rows longer than a block may be; new tokens go over the border of two blocks."""
    torch.manual_seed(19)
    q, new = torch.randn(2, 1, 4, 64, device=device), torch.randn(2, 2, 5, 2, 64, device=device)
    caches, before = torch.randn(2, 2, 5000, 2, 64, device=device), [2498, 10]
    kept = caches.clone()
    assert _oneshot.block_of(5000) == 2500
    out = flash_attn_with_kvcache(q, *caches, new[0], new[1], cache_seqlens=ints(before, device), causal=True)
    for i, n in enumerate(before):
        kept[:, i, n:n + 5] = new[:, i]
        check(out[i], attention(q[i], kept[0, i, :n + 5], kept[1, i, :n + 5])[0])
    assert torch.equal(caches, kept)


def rotated(x, angles, positions, interleaved):
    """x [rows, heads, size] in float64, its first numbers turned by the angles [positions, pairs] of its rows."""
    a, n = angles[positions][:, None], 2 * angles.shape[1]
    turned, rest = x.double().cpu()[..., :n], x.double().cpu()[..., n:]
    if interleaved:
        p, r = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([p * a.cos() - r * a.sin(), r * a.cos() + p * a.sin()], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)
    p, r = turned.chunk(2, -1)
    return torch.cat([p * a.cos() - r * a.sin(), r * a.cos() + p * a.sin(), rest], -1)


CACHED = {  # how a call differs from one of three queries and three new tokens of each sequence
    "plain": {},
    "rotary": {"rotary": 64},
    "rotary pairs": {"rotary": 32, "pairs": True},
    "rotary not causal": {"rotary": 64, "causal": False},
    "rotary window": {"rotary": 32, "causal": False, "window": (4, 1)},
    "rotary fewer new": {"rotary": 64, "new": [1, 1, 1, 1]},
    "rotary more new not causal": {"rotary": 32, "pairs": True, "new": [5, 5, 5, 5], "causal": False},
    "rotary positions": {"rotary": 64, "rotary_at": [3, 9, 0, 1]},
    "leftpad": {"leftpad": [0, 4, 2, 6]},
    "leftpad of whole pages": {"leftpad": [4, 4, 8, 0]},
    "leftpad odd": {"leftpad": [3, 1, 0, 7], "window": (4, -1)},
    "leftpad and slopes of each": {"leftpad": [3, 1, 0, 7], "slopes": True},
    "leftpad rotary": {"leftpad": [3, 1, 0, 7], "rotary": 64},
    "leftpad reads": {"leftpad": [2, 4, 0, 2], "new": None},
    "rows of index": {"index": [3, 0, 4, 1], "leftpad": [0, 1, 0, 0]},
    "ragged": {"queries": [3, 0, 17, 1]},
    "ragged reads": {"queries": [3, 0, 9, 1], "new": None, "causal": False},
    "ragged more new": {"queries": [3, 0, 9, 1], "new": [2, 4, 9, 0]},
    "ragged fixed new": {"queries": [3, 1, 9, 1], "new": [2, 2, 2, 2], "new_fixed": True},
    "ragged rows behind": {"queries": [3, 0, 9, 1], "new": [2, 4, 9, 0], "behind": 3},
    "ragged rotary": {"queries": [3, 0, 9, 1], "rotary": 64},
    "ragged rotary new not causal": {"queries": [3, 0, 9, 1], "new": [2, 4, 9, 0], "rotary": 32, "causal": False},
    "new is ragged": {"new": [2, 4, 9, 0], "new_ragged": True},
    "slopes of each": {"slopes": True},
    "slopes of each window": {"slopes": True, "window": (5, -1), "new": None},
    "slopes of each latent": {"slopes": True, "latent": True},
    "slopes of each ragged": {"slopes": True, "queries": [3, 0, 17, 1]},
    "latent": {"latent": True},
    "latent reads": {"latent": True, "new": None, "causal": False},
    "latent rotary": {"latent": True, "rotary": 32, "pairs": True},
    "latent ragged more new": {"latent": True, "queries": [3, 0, 9, 1], "new": [2, 4, 9, 0]},
    "latent leftpad": {"latent": True, "leftpad": [3, 1, 0, 7]},
    "fp8": {"fp8": [0.5, 0.02]},
    "fp8 more new": {"fp8": [0.5, 0.02], "new": [5, 5, 5, 5]},
    "fp8 saturates": {"fp8": [0.001, 0.002], "new": [5, 5, 5, 5]},
    "fp8 of each": {"fp8": [[0.5, 0.02], [1.5, 0.5], [0.1, 0.2], [0.01, 1.0]]},
    "fp8 latent more new": {"fp8": [0.5], "latent": True, "new": [5, 5, 5, 5]},
    "fp8 of each ragged": {"fp8": [[0.5, 0.02], [1.5, 0.5], [0.1, 0.2], [0.01, 1.0]], "queries": [3, 0, 9, 1],
                           "new": [2, 4, 9, 0], "new_ragged": True},
}


class CachedCall:
    """A call of flash_attn_with_kvcache with all that such a case may have, and what must come of it."""

    def __init__(self, device, paged, *, queries=None, new=(3, 3, 3, 3), new_fixed=False, new_ragged=False,
                 leftpad=None, rotary=0, rotary_at=None, pairs=False, causal=True, window=(-1, -1), slopes=False,
                 latent=False, fp8=None, index=None, behind=0):
        torch.manual_seed(21)
        self.before, self.leftpad, page, room = [7, 4, 20, 9], leftpad or [0] * 4, 4, 40
        self.q_lens = queries or [3] * 4
        self.new = [0] * 4 if new is None else self.q_lens if queries and new == (3, 3, 3, 3) else list(new)
        self.kv_heads, size, v_size = (1, 64, 128) if latent else (2, 64, 64)
        whole, device_ints = v_size + size, lambda x: ints(x, device)
        counts = [-(-(b + n) // page) for b, n in zip(self.before, self.new)]
        shape = (sum(counts) + 2, page) if paged else (5, room)
        memory = torch.full((*shape, self.kv_heads, whole), NAN, device=device)
        self.dtype = torch.float8_e4m3fn if fp8 else torch.float32
        if fp8:
            memory = memory.to(self.dtype)
        self.v_cache, self.k_cache = (memory[..., :v_size], memory[..., v_size:]) if latent else (
            memory[..., :v_size].clone(), memory[..., v_size:].clone())
        order = np.random.default_rng(6).permutation(shape[0]).tolist()
        self.table = [[order.pop() for _ in range(c)] for c in counts] if paged else []
        self.index, self.page, self.paged = index or [0, 1, 2, 3], page, paged
        self.scales = torch.ones(4, self.kv_heads) if fp8 is None else torch.tensor(fp8).expand(4, self.kv_heads)
        self.keys = [rows(n, self.kv_heads, size, device).to(self.dtype) for n in self.before]
        self.values = [rows(n, self.kv_heads, v_size, device).to(self.dtype) for n in self.before]
        for i in range(4):
            for t in range(self.leftpad[i], self.before[i]):
                self.k_cache[self.place(i, t)], self.v_cache[self.place(i, t)] = self.keys[i][t], self.values[i][t]
        q = rows(sum(self.q_lens), 4, size, device)
        k, v = rows(sum(self.new), self.kv_heads, size, device), rows(sum(self.new), self.kv_heads, v_size, device)
        self.qs, self.ks, self.vs = split(q, self.q_lens), split(k, self.new), split(v, self.new)
        if behind:  # rows behind the last sequence, with the last of which a write would show
            q, k, v = (torch.cat([x, x.new_full((behind, *x.shape[1:]), 5.0)]) for x in (q, k, v))
        qv = rows(sum(self.q_lens), 4, v_size, device) if latent else None
        self.qvs = split(qv, self.q_lens) if latent else None
        self.options = {"causal": causal, "window": window}
        self.slopes = torch.rand(4, 4) if slopes else None
        self.angles, self.pairs = torch.randn(room, rotary // 2).double() if rotary else None, pairs
        self.rotary_at, self.turns = rotary_at or self.before, causal or window != (-1, -1)

        def batched(x, lens):
            return None if x is None else x.unflatten(0, (4, lens[0]))

        given = {"causal": causal, "window_size": window, "cache_seqlens": device_ints(self.before)}
        if queries:
            given |= {"cu_seqlens_q": starts_of(self.q_lens, device), "max_seqlen_q": max(self.q_lens)}
        if new is not None:
            if (queries and not new_fixed) or new_ragged:
                given["cu_seqlens_k_new"] = starts_of(self.new, device)
                given |= {"k": k, "v": v}
            else:
                given |= {"k": batched(k, self.new), "v": batched(v, self.new)}
        if latent:
            given["qv"] = qv if queries else batched(qv, self.q_lens)
        if leftpad:
            given["cache_leftpad"] = device_ints(leftpad)
        if rotary:
            given |= {"rotary_cos": self.angles.cos().float().to(device), "rotary_interleaved": pairs,
                      "rotary_sin": self.angles.sin().float().to(device)}
            if rotary_at:
                given["rotary_seqlens"] = device_ints(rotary_at)
        if slopes:
            given["alibi_slopes"] = self.slopes.to(device)
        if fp8:
            given["k_descale"] = torch.tensor(fp8, device=device)
            if not latent:
                given["v_descale"] = torch.tensor(fp8, device=device) * 2
        self.v_scales = self.scales if latent or not fp8 else self.scales * 2
        if paged:
            wide = [row + [-1] * (max(counts) - len(row)) for row in self.table]
            given["page_table"] = device_ints(wide)
        elif index:
            given["cache_batch_idx"] = device_ints(index)
        self.q, self.given = q if queries else batched(q, self.q_lens), given

    def place(self, i, t):
        return (self.table[i][t // self.page], t % self.page) if self.paged else (self.index[i], t)

    def check(self, kind=lambda x: x):
        """kind: what makes the arrays of the call from tensors, in the same memory."""
        memory = [(x.float().cpu().clone(), x) for x in (self.k_cache, self.v_cache)]
        out, lse = flash_attn_with_kvcache(*map(kind, (self.q, self.k_cache, self.v_cache)), return_softmax_lse=True,
                                           **{name: kind(x) for name, x in self.given.items()})
        out, lse = torch.as_tensor(out), torch.as_tensor(lse)
        if self.q.dim() == 4:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        want, want_lse, size = [], [], self.q.shape[-1]
        for i in range(4):
            q, k, first = self.qs[i], self.ks[i], self.rotary_at[i]
            if self.angles is not None:
                q = rotated(q, self.angles, first + np.arange(len(q)) * self.turns, self.pairs)
                k = rotated(k, self.angles, first + np.arange(len(k)), self.pairs)
            part, k_scale, v_scale = slice(self.leftpad[i], None), self.scales[i, :, None], self.v_scales[i, :, None]
            new_k, new_v = ((x.cpu().double() / s).float().clamp(-448, 448).to(self.dtype).double() if self.scaled
                            else x.cpu().double() for x, s in ((k, k_scale), (self.vs[i], v_scale)))
            full_k = torch.cat([self.keys[i][part].cpu().double(), new_k]) * k_scale
            full_v = torch.cat([self.values[i][part].cpu().double(), new_v]) * v_scale
            for t in range(len(k)):  # what was stored
                where, place = self.before[i] + t, len(full_k) - len(k) + t
                for (before, now), full, scale in zip(memory, (full_k, full_v), (k_scale, v_scale)):
                    at = self.place(i, where)
                    check(now[at].float().cpu() * scale.float(), full[place])
                    before[at] = now[at].float().cpu()
            if self.qvs is not None:
                q = torch.cat([self.qvs[i].cpu().double(), q.cpu().double()], -1)
                full_k = torch.cat([full_v, full_k], -1)
            a, b = attention(q, full_k, full_v, slopes=None if self.slopes is None else self.slopes[i], **self.options)
            want.append(a), want_lse.append(b)
        total = sum(self.q_lens)
        check(out[:total], torch.cat(want))
        check(lse[:, :total], torch.cat(want_lse).T, "lse")
        assert (out[total:] == 0).all() and (lse[:, total:] == -torch.inf).all()
        for before, now in memory:  # nothing else was
            assert torch.equal(before.nan_to_num(77), now.float().cpu().nan_to_num(77))

    @property
    def scaled(self):
        return self.dtype != torch.float32


def check_case(device, paged, case, on_gpu):
    if on_gpu and "behind" in case:
        pytest.skip("on a GPU all rows of k are stored")
    call = CachedCall(device, paged, **CACHED[case])
    if on_gpu and "of each" in case:
        with pytest.raises(folio.UnsupportedError, match="a row for each sequence; that is supported on the host"):
            call.check()
    else:
        call.check()


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_with_kvcache_cases(device, case, paged):
    check_case(device, paged, case, device == "cuda")


@pytest.mark.parametrize("case", CACHED)
def test_with_kvcache_cases_of_numpy(case):
    def array(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return x.numpy()

    CachedCall("cpu", True, **CACHED[case]).check(array)


def test_numpy_arrays():
    torch.manual_seed(13)
    q, k, v = rows(10, 4, 64, "cpu"), rows(10, 2, 64, "cpu"), rows(10, 2, 64, "cpu")
    cu = np.array([0, 3, 10], np.int32)
    out, lse = flash_attn_varlen_func(q.numpy(), k.numpy(), v.numpy(), cu, cu, 7, 7, causal=True,
                                      return_softmax_lse=True)
    assert isinstance(out, np.ndarray)
    want = expected(split(q, [3, 7]), split(k, [3, 7]), split(v, [3, 7]))
    check(torch.from_numpy(out), want[0])
    check(torch.from_numpy(lse), want[1])
    q4, k4 = np.random.rand(2, 1, 4, 64).astype(np.float32), np.random.rand(2, 9, 2, 64).astype(np.float32)
    out, lse = flash_attn_func(q4, k4, k4, return_softmax_lse=True)
    for i in range(2):
        want, want_lse = attention(torch.from_numpy(q4[i]), torch.from_numpy(k4[i]), torch.from_numpy(k4[i]))
        check(torch.from_numpy(out[i]), want)
        check(torch.from_numpy(lse[i]), want_lse.T)
    none, lens = k.numpy()[:0], (np.array([0, 0], np.int32), np.array([0, 10], np.int32))
    assert flash_attn_varlen_func(none, k.numpy(), k.numpy(), *lens, 0, 10, return_softmax_lse=True)[1].shape == (2, 0)
    cache = np.zeros((2, 16, 2, 64), np.float32)
    out = flash_attn_with_kvcache(q4, cache, cache.copy(), k4[:, :1], k4[:, :1],
                                  cache_seqlens=np.array([0, 2], np.int32))
    assert (cache[0, 0] == k4[0, 0]).all() and (cache[1, 2] == k4[1, 0]).all() and (cache[1, 3:] == 0).all()


def test_changed_lengths_and_tables_are_seen(device):
    """Plans are kept, and refilled when what they were filled from has changed in place."""
    torch.manual_seed(14)
    pages, q = Pages(device, [9, 12], 4), torch.randn(2, 1, 4, 64, device=device)
    lens = ints([9, 12], device)
    for n in ([9, 12], [3, 12], [3, 1], [9, 12]):
        lens.copy_(ints(n, device))
        out = flash_attn_with_kvcache(q, pages.k, pages.v, cache_seqlens=lens, block_table=pages.table)
        for i in range(2):
            check(out[i], attention(q[i], pages.keys[i][: n[i]], pages.values[i][: n[i]])[0])
    lens.fill_(9)
    for order in ([0, 1], [1, 0]):
        pages.table[:] = pages.table[order]
        out = flash_attn_with_kvcache(q, pages.k, pages.v, cache_seqlens=lens, block_table=pages.table)
        check(out[0], attention(q[0], pages.keys[order[0]][:9], pages.values[order[0]][:9])[0])


def test_steps_are_found_by_what_arrays_held(device):
    """A kept step is used again after its arrays were overwritten, by a call with another plan."""
    torch.manual_seed(18)
    pages, q = Pages(device, [9, 12], 4), rows(2, 4, 64, device)
    starts, used, table = starts_of([1, 1], device), ints([9, 12], device), pages.table.clone()

    def run(soft_cap, lens, tables, n):
        out = flash_attn_varlen_func(q, pages.k, pages.v, starts, None, 1, 12, block_table=tables, seqused_k=lens,
                                     softcap=soft_cap)
        for i in range(2):
            check(out[i:i + 1], attention(q[i:i + 1], pages.keys[i][: n[i]], pages.values[i][: n[i]],
                                          soft_cap=soft_cap)[0])

    run(0.0, used, table, [9, 12])
    used.fill_(1)
    table[:, 1:] = -1
    run(0.0, used, table, [1, 1])
    run(2.0, ints([9, 12], device), pages.table, [9, 12])


def test_kept_caches_do_not_keep_memory(device):
    import weakref

    k = torch.randn(3, 16, 2, 64, device=device)
    v = torch.randn_like(k)
    table = ints([[2, 0]], device)
    flash_attn_with_kvcache(torch.randn(1, 1, 2, 64, device=device), k, v, cache_seqlens=20, block_table=table)
    storage = weakref.ref(k.untyped_storage())
    tensor = weakref.ref(k)
    del k, v
    assert tensor() is None and storage() is None


def test_same_plan_for_the_layers_of_a_step(device):
    if device != "cpu":
        pytest.skip("on a GPU plans are updated in each call, because the host does not see lengths")
    pages, q = Pages(device, [9, 12], 4), torch.randn(2, 1, 4, 64, device=device)
    lens = ints([9, 12], device)
    flash_attn_with_kvcache(q, pages.k, pages.v, cache_seqlens=lens, block_table=pages.table)
    plan = next(reversed(_oneshot.kept.plans.values())).plan
    calls, update = [], type(plan).update
    type(plan).update = lambda self, *a, **b: calls.append(update(self, *a, **b))
    try:
        for _ in range(3):
            flash_attn_with_kvcache(q, pages.v, pages.k, cache_seqlens=lens.clone(), block_table=pages.table.clone())
        assert calls == []
        flash_attn_with_kvcache(q, pages.v, pages.k, cache_seqlens=lens - 1, block_table=pages.table)
        assert len(calls) == 1
    finally:
        type(plan).update = update


def test_a_graph_takes_its_plan_out_of_those_that_are_kept(monkeypatch):
    at = _oneshot.attention(folio.default_context(), Geometry(4, 2, 64, 64, "f32", "f32", None, None, None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    capturing, step = False, (at, 4, 7, 2, 2, 1, 28)
    plan = _oneshot.device_plan(*step, 5)
    assert _oneshot.device_plan(*step, 5) is plan and _oneshot.device_plan(*step, 6) is not plan
    capturing = True
    first = _oneshot.device_plan(*step, 8)  # on a stream of its own
    assert first is plan and first.step is False and _oneshot.device_plan(*step, 9) is plan
    with pytest.raises(folio.ArgumentError, match="there is no plan for this geometry yet"):
        _oneshot.device_plan(at, 4, 7, 3, 3, 1, 28, 5)
    capturing = False
    assert _oneshot.device_plan(*step, 5) is not plan


def test_threads(device):
    torch.manual_seed(15)
    failures = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(10):
                lens = torch.randint(1, 40, (3,), generator=generator).tolist()
                q, k, v = (torch.randn(sum(lens), 2, 64, generator=generator).to(device) for _ in range(3))
                cu = starts_of(lens, device)
                check(flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, causal=True),
                      expected(split(q, lens), split(k, lens), split(v, lens))[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_bad_input(device):
    q, k = torch.randn(4, 4, 64, device=device), torch.randn(4, 2, 64, device=device)
    cu = starts_of([4], device)

    def reject(kind, sentence, call, *arguments, **options):
        with pytest.raises(kind, match=sentence):
            call(*arguments, **options)

    argument, unsupported, varlen = folio.ArgumentError, folio.UnsupportedError, flash_attn_varlen_func
    reject(unsupported, "dropout_p is 0.1", varlen, q, k, k, cu, cu, 4, 4, dropout_p=0.1)
    reject(unsupported, "no backward pass", varlen, q.clone().requires_grad_(), k, k, cu, cu, 4, 4)
    reject(argument, "cu_seqlens_k or seqused_k must be given", varlen, q, k, k, cu, None, 4, 4)
    reject(argument, r"q has shape \(4, 256\); it must be \[total_q, heads, size\]", varlen, q.flatten(1), k, k, cu, cu,
           4, 4)
    reject(argument, r"k has shape \(4, 2, 64\), but v has \(3, 2, 64\)", varlen, q, k, k[:3], cu, cu, 4, 4)
    reject(argument, "the heads of q have 64 numbers, but those of k 32", varlen, q, k[..., :32], k, cu, cu, 4, 4)
    reject(argument, r"window_size is \(3,\)", varlen, q, k, k, cu, cu, 4, 4, window_size=(3,))
    reject(argument, r"alibi_slopes has shape \(3,\); it must be \(4,\)", varlen, q, k, k, cu, cu, 4, 4,
           alibi_slopes=torch.zeros(3, device=device))
    cache = torch.zeros(2, 8, 2, 64, device=device)
    one = q[None, :1].expand(2, 1, 4, 64)
    cached = flash_attn_with_kvcache
    new = {"k": cache[:, :2], "v": cache[:, :2], "cache_seqlens": 1}
    reject(unsupported, "q_descale is not supported: q is f32, f16 or bf16", varlen, q, k, k, cu, cu, q_descale=q)
    reject(unsupported, "attention_chunk is not supported: use window_size", cached, one, cache, cache,
           attention_chunk=4)
    reject(unsupported, "seqused_q is not supported: let cu_seqlens_q", varlen, q, k, k, cu, cu, seqused_q=cu)
    reject(TypeError, "there is no argument 'softmax_scal'", varlen, q, k, k, cu, cu, softmax_scal=1.0)
    varlen(q, k, k, cu, cu, 4, 4, attention_chunk=0, q_descale=None, num_splits=3, pack_gqa=True, sm_margin=0)
    reject(argument, r"k_descale has shape \(4,\); it must be \(2,\) or \(1, 2\)", varlen, q, k, k, cu, cu, 4, 4,
           k_descale=q[:, 0, 0])
    two = starts_of([2, 2], device)
    reject(unsupported, "a row for each sequence; that is supported on the host and without s_aux", varlen, q,
           k, k, two, two, 2, 2, s_aux=q[:2, :, 0])
    reject(unsupported, r"with qv, k and v must be slices of one array \[..., 128\], v first", varlen, q, k, k, cu,
           cu, 4, 4, qv=q)
    reject(argument, r"qv has shape \(4, 4, 32\); it must be \(4, 4, 64\)", varlen, q, k, k, cu, cu, 4, 4,
           qv=q[..., :32])
    reject(unsupported, "the heads of k and v have 60 and 64 numbers; in a cache", cached, one[..., :60],
           cache[..., :60], cache)
    reject(argument, "rotary_cos is given without k and v", cached, one, cache, cache, rotary_cos=q[0], rotary_sin=q[0],
           cache_seqlens=1)
    reject(argument, r"k has shape \(2, 2, 2, 64\); it must have 4 dims, or 3", cached, one, cache,
           cache, **new, cu_seqlens_k_new=ints([0, 1, 2], device))
    reject(argument, "k is given without v", flash_attn_with_kvcache, one, cache, cache, cache[:, :1])
    reject(argument, "cache_seqlens is missing", flash_attn_with_kvcache, one, cache, cache, cache[:, :1], cache[:, :1])
    if device == "cpu":  # a GPU's numbers are not looked at
        reject(argument, "cache_leftpad must have 2 entries, each from 0 to", cached, one, cache, cache,
               cache_seqlens=3, cache_leftpad=ints([0, 4], device))
        reject(argument, "rotary_cos has 2 positions, but a row is at position 2", cached, one, cache, cache, **new,
               rotary_cos=q[0, :2], rotary_sin=q[0, :2])
        reject(argument, r"new tokens \(1,\), not \(2,\)", cached, one,
               cache, cache, k=k, v=k, cache_seqlens=1, cu_seqlens_k_new=cu)
        reject(argument, "cu_seqlens_q must start at 0, never decrease, and end at most at 4", varlen, q, k, k,
               starts_of([5], device), cu, 5, 4)
        reject(argument, r"cache_seqlens\[1\] = 8, with 1 new tokens, is outside \[0, 8\]", flash_attn_with_kvcache,
               one, cache, cache.clone(), cache[:, :1].clone(), cache[:, :1].clone(),
               cache_seqlens=ints([3, 8], device))
        reject(argument, r"cache_batch_idx must have 2 entries in \[0, 2\)", flash_attn_with_kvcache, one, cache, cache,
               cache_batch_idx=ints([0, 2], device))
        reject(argument, r"block_table\[0\] = 9 is outside \[-1, 2\)", flash_attn_with_kvcache, one[:1], cache, cache,
               cache_seqlens=3, block_table=ints([[9]], device))
    assert (cache == 0).all()


@pytest.mark.parametrize("sizes", [(59, 59), (40, 59), (59, 40), (4, 4)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_heads_of_other_sizes(device, sizes, causal):
    """Head sizes that are no multiple of 8."""
    torch.manual_seed(22)
    lens = [3, 0, 17]
    for k_lens in (lens, [5, 2, 33]):
        q, k, v = (rows(sum(n), h, s, device) for n, h, s in ((lens, 4, sizes[0]), (k_lens, 2, sizes[0]),
                                                              (k_lens, 2, sizes[1])))
        target = torch.full((sum(lens) + 1, 4, sizes[1]), 7.0, device=device)
        more = torch.cat([q, q[:1]])  # a row behind the last sequence
        call = starts_of(lens, device), starts_of(k_lens, device), 17, max(k_lens)
        want, want_lse = expected(split(q, lens), split(k, k_lens), split(v, k_lens), causal=causal)
        out, lse = flash_attn_varlen_func(q, k, v, *call, causal=causal, return_softmax_lse=True)
        check(out, want)
        check(lse, want_lse, "lse")
        assert out.is_contiguous()
        assert flash_attn_varlen_func(more, k, v, *call, causal=causal, out=target) is target
        check(target[:-1], want)
    fixed = flash_attn_func(q[None, 3:], k[None, 7:], v[None, 7:], causal=causal, softmax_scale=0.3)
    check(fixed[0], attention(q[3:], k[7:], v[7:], causal=causal, scale=0.3)[0])


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": False, "window": (3, 2)}], ids=str)
@pytest.mark.parametrize("k_lens", [SAME, LONGER, SHORTER], ids=["same", "longer", "shorter"])
def test_slopes_of_each_sequence(device, options, k_lens):
    if device != "cpu":
        pytest.skip("only one row of slopes is supported on a GPU")
    torch.manual_seed(23)
    slopes = torch.rand(5, 4)
    q, k, v = (rows(sum(n), h, 64, device) for n, h in ((Q_LENS, 4), (k_lens, 2), (k_lens, 2)))
    given = {"alibi_slopes": slopes.to(device), **flash(options, device)}
    out, lse = flash_attn_varlen_func(torch.cat([q, q[:2]]), k, v, starts_of(Q_LENS, device), starts_of(k_lens, device),
                                      40, max(k_lens), return_softmax_lse=True, **given)
    parts = [attention(*x, slopes=s, **options) for *x, s in zip(split(q, Q_LENS), split(k, k_lens), split(v, k_lens),
                                                                slopes)]
    check(out[:-2], torch.cat([p[0] for p in parts]))
    check(lse[:, :-2], torch.cat([p[1] for p in parts]).T, "lse")
    assert (out[-2:] == 0).all() and (lse[:, -2:] == -torch.inf).all()
    for keys in (8, 8 + k_lens[0], 8 - k_lens[0]):
        q4, k4, v4 = q[:40].view(5, 8, 4, 64), *rows(10 * keys, 2, 64, device).view(2, 5, keys, 2, 64)
        out, lse = flash_attn_func(q4, k4, v4, return_softmax_lse=True, **given)
        flat = flash_attn_varlen_func(q[:40], k4.flatten(0, 1), v4.flatten(0, 1), starts_of([8] * 5, device),
                                      starts_of([keys] * 5, device), 8, keys, **given)
        for i in range(5):
            want, want_lse = attention(q4[i], k4[i], v4[i], slopes=slopes[i], **options)
            check(out[i], want)
            check(flat[8 * i:8 * i + 8], want)
            check(lse[i], want_lse.T, "lse")


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("k_lens", [SAME, LONGER], ids=["same", "longer"])
def test_latent_heads(device, paged, k_lens):
    """qv: k and v are slices of one array."""
    torch.manual_seed(24)
    q, qv = rows(sum(Q_LENS), 4, 64, device), rows(sum(Q_LENS), 4, 128, device)
    pages = Pages(device, k_lens, 4, kv_heads=1, size=192)
    held = torch.cat(pages.keys)
    k, options = pages.k if paged else held, {"block_table": pages.table} if paged else {}
    starts = starts_of(Q_LENS, device), starts_of(k_lens, device)
    both = torch.cat([qv, q], -1)
    for heads, k_heads in ((both, k), (q, k[..., 128:])):  # the same rows and memory without qv
        out = flash_attn_varlen_func(heads, k_heads, k[..., :128], *starts, 40, max(k_lens), causal=True, **options)
        first = 192 - k_heads.shape[-1]
        check(out, expected(split(heads, Q_LENS), [x[..., first:] for x in pages.keys],
                            [x[..., :128] for x in pages.keys])[0])
    out, lse = flash_attn_varlen_func(q, k[..., 128:], k[..., :128], *starts, 40, max(k_lens), causal=True, qv=qv,
                                      return_softmax_lse=True, **options)
    want, want_lse = expected(split(both, Q_LENS), pages.keys, [x[..., :128] for x in pages.keys])
    check(out, want)
    check(lse, want_lse, "lse")
    for keys in (3, 5):
        out = flash_attn_func(q[None, :3], held[None, :keys, :, 128:], held[None, :keys, :, :128], qv=qv[None, :3])
        check(out[0], attention(both[:3], held[:keys], held[:keys, :, :128], causal=False)[0])


def test_packed_functions(device):
    """They give what the functions of separate tensors give, with the options in the same order."""
    torch.manual_seed(25)
    qkv, kv, q = (torch.randn(2, 6, *n, 4, 64, device=device) for n in ((3,), (2,), ()))
    cu, ck = starts_of([5, 7], device), starts_of([4, 8], device)
    options = (0.0, 0.3, True, (3, 0), 2.0, torch.rand(4, device=device), False, True)  # FlashAttention's order
    flat_qkv, flat_kv, flat_q = (x.flatten(0, 1) for x in (qkv, kv, q))
    pairs = [
        (package.flash_attn_qkvpacked_func(qkv, *options), flash_attn_func(*qkv.unbind(2), *options)),
        (package.flash_attn_kvpacked_func(q, kv, *options), flash_attn_func(q, *kv.unbind(2), *options)),
        (package.flash_attn_varlen_qkvpacked_func(flat_qkv, cu, 7, *options),
         flash_attn_varlen_func(*flat_qkv.unbind(1), cu, cu, 7, 7, *options)),
        (package.flash_attn_varlen_kvpacked_func(flat_q, flat_kv, cu, ck, 7, 8, *options),
         flash_attn_varlen_func(flat_q, *flat_kv.unbind(1), cu, ck, 7, 8, *options)),
    ]
    for (out, lse, probs), (want, want_lse, _) in pairs:
        assert torch.equal(out, want) and torch.equal(lse, want_lse) and probs is None
    check(pairs[0][0][0][1], attention(*qkv[1].unbind(1), scale=0.3, window=(3, 0), soft_cap=2.0, slopes=options[5])[0])


def test_bert_padding(device):
    torch.manual_seed(26)
    x = torch.randn(3, 5, 2, 4, device=device)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]], device=device)
    unused = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], device=device)
    for more, places in ((None, [0, 1, 2, 11, 13, 14]), (unused, [0, 1, 2, 3, 5, 11, 13, 14])):
        out, indices, cu, longest, used = bert_padding.unpad_input(x, mask, more)
        assert torch.equal(out, x.flatten(0, 1)[places]) and indices.tolist() == places
        assert cu.tolist() == ([0, 3, 3, 6] if more is None else [0, 4, 5, 8]) and cu.dtype == torch.int32
        assert longest == (3 if more is None else 4) and type(longest) is int
        assert used.tolist() == [3, 0, 3] and used.dtype == torch.int32
        back = bert_padding.pad_input(out, indices, 3, 5)
        taken = mask if more is None else mask + more
        assert torch.equal(back, x * taken[..., None, None])
    assert torch.equal(bert_padding.unpad_input(x, mask.bool())[0], x[mask.bool()])
    assert torch.equal(bert_padding.index_first_axis(x, indices[1:3]), x[1:3])
    filled = bert_padding.index_put_first_axis(x[0, :2], torch.tensor([3, 1], device=device), 4)
    assert torch.equal(filled[[3, 1]], x[0, :2]) and (filled[[0, 2]] == 0).all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [16, 32])
def test_apply_rotary_emb(device, dtype, interleaved, half):
    torch.manual_seed(27)
    x, angles = torch.randn(2, 6, 3, 64, device=device).to(dtype), torch.randn(24, half).double()
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    for offsets, first in ((0, (0, 0)), (4, (4, 4)), (ints([9, 14], device), (9, 14))):
        want = torch.stack([rotated(x[i], angles, first[i] + np.arange(6), interleaved) for i in range(2)])
        given, options = x.clone(), {"interleaved": interleaved, "seqlen_offsets": offsets}
        out = apply_rotary_emb(given, cos, sin, **options)
        check(out, want)
        assert torch.equal(given, x) and out.dtype == dtype
        assert apply_rotary_emb(given, cos, sin, inplace=True, **options) is given and torch.equal(given, out)
        if device == "cpu" and dtype == torch.float32:
            assert np.array_equal(apply_rotary_emb(x.numpy(), cos.numpy(), sin.numpy(), **options |
                                                   {"seqlen_offsets": np.asarray(offsets)}), out.numpy())
        flat = x.flatten(0, 1)
        out = apply_rotary_emb(flat, cos, sin, cu_seqlens=starts_of([4, 8], device), max_seqlen=8, **options)
        places = np.concatenate([first[0] + np.arange(4), first[1] + np.arange(8)])
        check(out, rotated(flat, angles, places, interleaved))


def test_empty_batches_and_no_keys(device):
    none = torch.zeros(0, 2, 64, device=device)
    cu = starts_of([], device)
    assert flash_attn_varlen_func(none, none, none, cu, cu, 0, 0).shape == (0, 2, 64)
    q = torch.randn(3, 2, 64, device=device)
    out, lse = flash_attn_varlen_func(q, none, none, starts_of([3], device), starts_of([0], device), 3, 0,
                                      return_softmax_lse=True)
    assert (out == 0).all() and (lse == -float("inf")).all()
    assert flash_attn_func(none[None], none[None], none[None]).shape == (1, 0, 2, 64)


@pytest.mark.slow
def test_compiled_equals_eager(device):
    torch.manual_seed(16)
    q, k, v = rows(10, 4, 64, device), rows(10, 2, 64, device), rows(10, 2, 64, device)
    cu, pages = starts_of([3, 7], device), Pages(device, [3, 9], 4, spare=1)
    slopes = torch.rand(4, device=device)

    def model(q, k, v, cu, k_pages, v_pages, table, lens, slopes):
        a, lse = flash_attn_varlen_func(q * 2, k, v, cu, cu, 7, 7, causal=True, return_softmax_lse=True)
        target = torch.empty_like(a)
        flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, window_size=(2, 1), softcap=4.0, out=target)
        b = flash_attn_func(q[None], k[None, :4], v[None, :4], causal=True, alibi_slopes=slopes)
        c = flash_attn_with_kvcache(q[:2, None] + 1, k_pages, v_pages, k[:2, None], v[:2, None], cache_seqlens=lens,
                                    block_table=table, causal=True)
        return a + 1, lse, b, c * 2, target, k_pages.nan_to_num(0).sum()

    inputs = (q, k, v, cu, pages.k, pages.v, pages.table, ints([3, 9], device), slopes)
    with torch.no_grad():
        want = model(*inputs[:4], pages.k.clone(), pages.v.clone(), *inputs[6:])
        got = torch.compile(model, fullgraph=True)(*inputs)
    for a, b in zip(got, want):
        check(a, b.double().cpu())
    assert torch.equal(pages.k[pages.table[0, 0], 3], k[0])  # the caller's pages were written


def test_opcheck(device):
    torch.manual_seed(17)
    q, k = rows(10, 4, 64, device), rows(10, 2, 64, device)
    cu, ops = starts_of([3, 7], device), torch.ops.folio
    cache = torch.randn(2, 8, 2, 64, device=device)
    varlen = {"q": q, "k": k, "v": k, "cu_q": cu, "cu_k": cu, "max_q": 7, "max_k": 7}
    stored = {"q": q[:2, None], "k_cache": cache, "v_cache": cache.clone(), "k": k[:2, None], "v": k[:2, None],
              "lens": ints([1, 5], device), "interleaved": True}
    into = varlen | {"out": torch.empty_like(q)}
    ragged = stored | {"q": q, "k": k, "v": k, "cu_q": cu, "cu_new": cu, "lens": ints([1, 0], device)}
    calls = [(ops.flash_attn_varlen, varlen, True), (ops.flash_attn_varlen_out, into, False),
             (ops.flash_attn, {"q": q[None], "k": k[None], "v": k[None]}, True),
             (ops.flash_attn_kvcache, stored, True), (ops.flash_attn_kvcache, ragged, True)]
    for operator, given, lse in calls:  # by name: all that is left out is None
        given |= {"causal": True, "left": -1, "right": -1, "softcap": 0.0, "lse": lse}
        names = [a.name for a in operator.default._schema.arguments]
        assert given.keys() <= set(names)
        torch.library.opcheck(operator.default, tuple(given.get(name) for name in names))


def test_cuda_graph(device):
    """A captured call is replayed with other lengths."""
    if device != "cuda":
        pytest.skip("host backends have no graphs")
    pages, q = Pages(device, [9, 12], 4), torch.randn(2, 1, 4, 64, device=device)
    lens = ints([9, 12], device)

    def run():
        return flash_attn_with_kvcache(q, pages.k, pages.v, cache_seqlens=lens, block_table=pages.table)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for n in ([9, 12], [3, 1], [1, 11]):
        lens.copy_(ints(n, device))
        graph.replay()
        torch.cuda.synchronize()
        for i in range(2):
            check(out[i], attention(q[i], pages.keys[i][: n[i]], pages.values[i][: n[i]])[0])
        run()  # eager calls in between have plans of their own


def test_rows_behind_the_last_sequence_are_zeros():
    q = torch.randn(6, 2, 64)
    for starts in ([0, 2, 4], [0]):
        cu = torch.tensor(starts, dtype=torch.int32)
        for _ in range(3):
            torch.full((6, 2, 64), float("nan"))  # what the result's memory may hold
            out, lse = flash_attn_varlen_func(q, q, q, cu, cu, 2, 2, causal=True, return_softmax_lse=True)
            assert (out[starts[-1]:] == 0).all() and (lse[:, starts[-1]:] == -torch.inf).all()
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    for size in (64, 60):
        given, x = torch.full((6, 2, size), 7.0), q[..., :size]
        flash_attn_varlen_func(x, x, x, cu, cu, 2, 2, causal=True, out=given)
        assert (given[4:] == 7).all() and (given[:4] != 7).any()


def test_gradients_of_new_keys_are_refused():
    q, pages = torch.randn(1, 1, 2, 64), torch.zeros(2, 16, 2, 64)
    new = torch.randn(1, 1, 2, 64, requires_grad=True)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    with pytest.raises(folio.UnsupportedError, match="no backward pass"):
        flash_attn_with_kvcache(q, pages, pages.clone(), new, q, cache_seqlens=3, block_table=table, causal=True)


@pytest.mark.parametrize("numpy", [False, True])
def test_rotary_tables_written_in_place(numpy: bool) -> None:
    """The tables of a call are those that it is given, not those that lay there at an earlier call."""
    cos, sin = torch.ones(32, 16), torch.zeros(32, 16)
    q, k = torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 32)

    def run(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(2, 1, 32, 4, 32)
        given = [x.numpy() if numpy else x for x in (q, cache[0], cache[1], k, k, cos, sin)]
        folio.flash_attn.flash_attn_with_kvcache(*given, cache_seqlens=3, causal=True)
        return cache[0]

    before = run(cos, sin)
    angles = torch.rand(32, 16) + 1.0
    cos.copy_(angles.cos()), sin.copy_(angles.sin())
    after = run(cos, sin)
    assert (after == run(cos.clone(), sin.clone())).all() and (after - before).abs().max() > 0.1
    cos.numpy()[3], sin.numpy()[3] = 1.0, 0.0  # torch does not count it
    assert (run(cos, sin) == before).all()
