"""For functions that get everything in one call: attentions, plans and wrapped caches, kept and found by geometry.

Each thread has its own, because a plan's workspace serves one thread. Nothing here keeps memory of the caller alive:
a wrapped cache is only an address with strides, and it is found by exactly these.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import OrderedDict
from typing import Any, Callable, Optional

import numpy as np

from . import _abi as abi
from ._arrays import _BY_NAME, Array, dtype_of, numpy_dtype
from ._library import Handle, create, lib, make
from .attention import Attention, type_of
from .batch import Batch
from .cache import KVCache, _desc
from .context import Context
from .errors import ArgumentError
from .plan import Plan, options

MAX_BLOCK = 4096  # tokens of a block, by folio_kv_cache_desc


class Recent(OrderedDict):
    """The last `limit` values by key."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def find(self, key: Any, make_value: Callable) -> Any:
        value = self.get(key)
        if value is None:
            value = self[key] = make_value()
            if len(self) > self.limit:
                self.popitem(last=False)
        else:
            self.move_to_end(key)
        return value


class _Kept(threading.local):
    def __init__(self) -> None:
        self.attentions, self.caches, self.plans = Recent(64), Recent(1024), Recent(32)
        self.captured: dict = {}  # plans that CUDA graphs refer to


kept = _Kept()


def attention(context: Context, heads: int, kv_heads: int, size: int, v_size: int, dtype: Any, kv_dtype: Any,
              scale: Optional[float], window: tuple, soft_cap: float) -> Attention:
    key = (context, heads, kv_heads, size, v_size, dtype, kv_dtype, scale, window, soft_cap)
    return kept.attentions.find(key, lambda: Attention(
        context, num_heads=heads, num_kv_heads=kv_heads, head_size=size, v_head_size=v_size, dtype=dtype,
        kv_dtype=kv_dtype, scale=scale, window=window, soft_cap=soft_cap))


def wrap(context: Context, k: Array, v: Array, num_blocks: int, block_size: int, k_strides: tuple,
         v_strides: tuple, heads: int) -> KVCache:
    """A cache in memory of the caller. Strides: elements from one block, token and head to the next."""
    key = (context, k.data, v.data, k.dtype, num_blocks, block_size, heads, k.shape[-1], v.shape[-1], k_strides, v_strides)
    return kept.caches.find(key, lambda: _wrap(context, k, v, num_blocks, block_size, k_strides, v_strides, heads))


def _wrap(context: Context, k: Array, v: Array, num_blocks: int, block_size: int, k_strides: tuple, v_strides: tuple,
          heads: int) -> KVCache:
    for name, a in (("k", k), ("v", v)):
        if a.device != context.place:
            raise ArgumentError(f"{name} is on {a.device[0]}:{a.device[1]}, but q is on "
                                f"{context.place[0]}:{context.place[1]}")
        if a.dtype not in _BY_NAME or a.dtype != k.dtype:
            raise ArgumentError(f"{name} has dtype {a.dtype}, k {k.dtype}; they must be equal, and f32, f16, bf16 or fp8")
        if a.strides[-1] != 1:
            raise ArgumentError(f"{name} has strides {tuple(a.strides)}; the last must be 1")
    size = numpy_dtype(dtype_of(k.dtype)).itemsize

    def extent(a: Array, strides: tuple) -> int:
        counts = (num_blocks, block_size, heads)
        return (sum((n - 1) * s for n, s in zip(counts, strides)) + a.shape[-1]) * size

    desc = _desc(1, num_blocks, block_size, heads, k.shape[-1], v.shape[-1], k.dtype, "strided", False)
    bases = (ctypes.c_void_p * 1)(k.data), (ctypes.c_void_p * 1)(v.data)
    memory = make(abi.folio_kv_memory, k=ctypes.addressof(bases[0]), v=ctypes.addressof(bases[1]),
                  k_bytes=extent(k, k_strides), v_bytes=extent(v, v_strides))
    memory.k_strides, memory.v_strides = abi.folio_kv_strides(*k_strides), abi.folio_kv_strides(*v_strides)
    cache = KVCache.__new__(KVCache)
    cache.context = context
    Handle.__init__(cache, create(lib.folio_kv_cache_wrap, context, ctypes.byref(desc), ctypes.byref(memory)),
                    lib.folio_kv_cache_destroy, context)
    cache._describe()
    return cache


def block_of(count: int) -> int:
    """The largest divisor of a length that a block may have: rows of that length are then whole blocks."""
    if count <= MAX_BLOCK:
        return max(count, 1)
    best = 1
    for d in range(1, math.isqrt(count) + 1):
        if count % d == 0:
            best = max([best] + [x for x in (d, count // d) if x <= MAX_BLOCK])
    return best


def limit(n: int) -> int:
    """The next power of two, so that plans are made anew only now and then."""
    return 1 << max(int(n) - 1, 0).bit_length()


class _Planned:
    """A plan with its batch, and what the batch was filled from."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self.plan, self.batch = plan, batch
        self.filled: Optional[tuple] = None


def _host_plan(at: Attention, kind: str, block_size: int, num_blocks: int, seqs: int, tokens: int, longest: int,
               encoder_tokens: int) -> _Planned:
    need = [max(n, 1) for n in (seqs, tokens, longest)] + [encoder_tokens]
    key = (at, kind, block_size, num_blocks)
    found = kept.plans.get(key)
    if found is not None:
        p = found.plan
        have = [p.max_seqs, p.max_query_tokens, p.max_seq_len, p.max_encoder_tokens]
        if all(n <= h for n, h in zip(need, have)):
            kept.plans.move_to_end(key)
            return found
        need = [max(n, h) for n, h in zip(need, have)]
    need = [limit(n) if n else 0 for n in need]
    plan = Plan(at, types=kind, block_size=block_size, num_blocks=num_blocks, max_seqs=need[0],
                max_query_tokens=need[1], max_seq_len=need[2], max_encoder_tokens=need[3])
    kept.plans.pop(key, None)
    return kept.plans.find(key, lambda: _Planned(plan, Batch(at.context, block_size=block_size)))


def cut_queries(q_start: np.ndarray, k_lens: np.ndarray) -> Optional[tuple]:
    """Sequences with more rows than keys, cut into pieces with at most as many: a batch has no others.

    Returns (q_start, the sequence of each piece, position of its first row), or None if there is nothing to cut. Pieces
    of a sequence without keys stay whole: they are padding."""
    q_lens = np.diff(q_start)
    if (q_lens <= k_lens).all():
        return None
    counts = np.where((k_lens > 0) & (q_lens > 0), -(-q_lens // np.maximum(k_lens, 1)), 1)
    seqs = np.repeat(np.arange(k_lens.size), counts)
    number = np.arange(seqs.size) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its sequence
    begins = number * k_lens[seqs]
    starts = np.append(q_start[:-1][seqs] + begins, q_start[-1]).astype(np.int32)
    return starts, seqs, (k_lens - q_lens)[seqs] + begins


def _fill(batch: Batch, q_start: np.ndarray, k_lens: np.ndarray, tables: Optional[np.ndarray], causal: bool,
          cross: bool, cut: Optional[tuple]) -> None:
    extra: dict = {}
    if cross:
        extra = {"encoder_lens": k_lens, "encoder_new_lens": k_lens}
        k_lens = np.maximum(np.diff(q_start), 1).astype(np.int32)
    elif cut is not None:
        q_start, seqs, first = cut
        k_lens, tables = k_lens[seqs], None if tables is None else tables[seqs]
        extra = {"first_query_pos": first.astype(np.int64), "first_key_pos": np.zeros(seqs.size, np.int64)}
    if not causal and not cross:
        extra["causality"] = np.full(k_lens.size, abi.FOLIO_CAUSAL_NO, np.int32)
    batch.set_block_tables(tables, k_lens, q_start, **extra)


def host_forward(at: Attention, q: Any, out: Any, lse: Any, q_start: np.ndarray, k_lens: np.ndarray, *, causal: bool,
                 k: Any = None, v: Any = None, cache: Optional[KVCache] = None, tables: Optional[np.ndarray] = None,
                 slopes: Any = None, sinks: Any = None, rotary: Any = None) -> None:
    """Attention on the CPU. With a cache: over its blocks, after k and v (if given) were stored as the last keys of
    each sequence. Without one: over k and v, one sequence after another."""
    cross = cache is None and not np.array_equal(np.diff(q_start), k_lens)
    kind = "encoder_decoder" if cross else "decoder"
    cut = cut_queries(q_start, k_lens) if cache is not None else None
    seqs = k_lens.size if cut is None else cut[1].size
    longest = int(k_lens.max(initial=1))
    if cross:
        longest = max(longest, int(np.diff(q_start).max(initial=1)))
    planned = _host_plan(at, kind, cache.block_size if cache else 0, cache.num_blocks if cache else 0, seqs,
                         int(q_start[-1]), longest, int(k_lens.sum()) if cross else 0)
    contents = (q_start.tobytes(), k_lens.tobytes(), None if tables is None else tables.tobytes(), causal)
    if planned.filled != contents:  # the layers of a step mostly have the same
        planned.filled = None
        _fill(planned.batch, q_start, k_lens, tables, causal, cross, cut)
        planned.plan.update(planned.batch)
        planned.filled = contents
    tail = b""
    if slopes is not None or sinks is not None or rotary is not None:
        tail, keep = options(at.context, at, slopes, sinks, rotary=rotary)
    planned.plan._forward(at, 0, type_of(kind), q, k, v, cache, 0, out, lse, tail)


def device_plan(at: Attention, block_size: int, num_blocks: int, seqs: int, tokens: int, query_len: int,
                longest: int) -> Plan:
    """A plan for update_device() on the current stream. A plan that a CUDA graph was captured with stays for good, and
    serves only graphs."""
    import torch

    context = at.context
    one = query_len == 1  # launches nothing for prompts
    limits = (limit(seqs), limit(tokens), 1 if one else limit(min(query_len, tokens)), longest)
    key = (at, block_size, num_blocks, *limits)
    stream = context.stream()
    if torch.cuda.is_current_stream_capturing():
        plan = kept.captured.get(key)
        if plan is None:  # nothing can be allocated now: take a plan of the calls before, on whatever stream they were
            old = next((k for k in kept.plans if k[:-1] == key), None)
            if old is None:
                raise ArgumentError("there is no plan for this geometry yet, and none can be made while a CUDA graph is "
                                    "captured: call the function once before")
            plan = kept.captured[key] = kept.plans.pop(old)
        return plan
    return kept.plans.find((*key, stream), lambda: Plan(
        at, block_size=block_size, num_blocks=num_blocks, max_seqs=limits[0], max_query_tokens=limits[1],
        max_query_len=limits[2], max_seq_len=longest))


def not_causal(count: int, like: Any) -> Any:
    """int32 [count] of FOLIO_CAUSAL_NO where `like` is."""
    return like.new_full((count,), abi.FOLIO_CAUSAL_NO, dtype=_int32())


def _int32() -> Any:
    import torch

    return torch.int32
