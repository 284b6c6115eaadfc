"""For functions that get everything in one call: attentions, plans and wrapped caches, kept and found by geometry.

Such a call has no object that could hold its plan, and the layers of a step may take turns with several geometries: so
the last 32 plans are kept. Where there is an object, it holds one plan: a wrapper of FlashInfer, a layer group of
transformers, a builder of vLLM. Plans grow. Only those that are updated from arrays on a GPU need limits: powers of
two. Each has a plan of its own here, because limits also choose kernels.

Each thread has its own, because a plan's workspace serves one thread. Nothing here keeps memory of the caller alive:
a wrapped cache is only an address with strides, and it is found by exactly these.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import numpy as np

from . import _abi as abi
from ._arrays import Array, is_torch, required_array
from .attention import TYPES, Attention, Geometry
from .batch import Batch
from .cache import KVCache
from .context import Context
from .errors import ArgumentError, UnsupportedError
from .plan import Plan, attention_forward, options, run_layer

MAX_BLOCK = 4096  # tokens of a block, by folio_kv_cache_desc


class Recent(OrderedDict):
    """The last `limit` values by key."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def find(self, key: Any, make_value: Callable, arguments: tuple = ()) -> Any:
        value = self.get(key)
        if value is None:
            return self.put(key, make_value(*arguments))
        self.move_to_end(key)
        return value

    def put(self, key: Any, value: Any) -> Any:
        self[key] = value
        if len(self) > self.limit:
            self.popitem(last=False)
        return value


class _Kept(threading.local):
    def __init__(self) -> None:
        self.attentions, self.caches, self.plans = Recent(64), Recent(1024), Recent(32)
        self.steps = Recent(16)  # HostStep and more, by the contents of the index arrays
        self.layers = Recent(1024)  # of folio.flash_attn on a GPU
        self.rotaries = Recent(8)
        self.masks: list = []  # (weak reference, key, Visible) of the last masks of folio.transformers
        self.captured: dict = {}  # plans that CUDA graphs refer to


kept = _Kept()
_for_good: list = []  # the plans of graphs, which may outlive the thread that captured them


def attention(context: Context, geometry: Geometry) -> Attention:
    key = (context, geometry)
    return kept.attentions.find(key, _make_attention, key)


def _make_attention(context: Context, geometry: Geometry) -> Attention:
    return Attention(context, **geometry._asdict())


def wrap(context: Context, k: Array, v: Array, num_blocks: int, block_size: int, heads: int, k_strides: tuple,
         v_strides: tuple, v_in_k: bool = False) -> KVCache:
    """A cache in memory of the caller. Strides: elements from one block, token and head to the next. v_in_k: of v
    only the size counts."""
    key = (context, k.data, v.data, k.dtype, num_blocks, block_size, heads, k.shape[-1], v.shape[-1], k_strides,
           v_strides, v_in_k)
    return kept.caches.find(key, lambda: KVCache._strided(
        context, [k], [] if v_in_k else [v], (num_blocks, block_size, heads), k_strides, v_strides, v.shape[-1],
        v_in_k))


def block_of(count: int) -> int:
    """The largest divisor of a length that a block may have: rows of that length are then whole blocks."""
    if count <= MAX_BLOCK:
        return max(count, 1)
    best = 1
    for d in range(1, math.isqrt(count) + 1):
        if count % d == 0:
            best = max([best] + [x for x in (d, count // d) if x <= MAX_BLOCK])
    return best


def cache_rows(context: Context, k: Array, v: Array, v_in_k: bool = False) -> tuple:
    """K and V [rows, max_len, kv_heads, size] as a cache, and how many blocks a row has."""
    rows, count, heads, _ = k.shape
    size = block_of(count)
    strides: list[Any] = []
    for name, a in (("k", k), ("v", v)):
        row, token, head, _ = a.strides
        if size < count and row != count * token and rows > 1:
            raise UnsupportedError(f"{name} has {count} rows for each sequence, more than the {MAX_BLOCK} of a block, "
                                   f"and strides {tuple(a.strides)}; its first two dims must have no gap")
        strides.append((row if size == count else size * token, token, head))
    return wrap(context, k, v, rows * (count // size), size, heads, strides[0], strides[1], v_in_k), count // size


def limit(n: int) -> int:
    """The next power of two, so that plans are made anew only now and then."""
    return 1 << (int(n) - 1).bit_length() if n > 1 else 1


def contents(value: Any, name: str) -> Any:
    """What tells whether an index array in host memory is the same as before."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, np.ndarray):
        a = value
    elif is_torch(value) and value.is_cpu:
        a = value.numpy()
    else:
        a = required_array(value, np.int64, name)
    return a.shape, a.dtype.char, a.tobytes()


def positions(q_start: np.ndarray, k_lens: np.ndarray) -> dict:
    """Arrays of a batch that put the last row of each sequence at its last key. Only a batch with more queries than
    keys somewhere needs them; the others do so by themselves."""
    first = k_lens - np.diff(q_start)
    if (first >= 0).all():
        return {}
    return {"first_query_pos": first.astype(np.int64), "first_key_pos": np.zeros(first.size, np.int64)}


class HostStep:
    """The sequences of one step: where their rows begin [seqs + 1], how many keys they have [seqs], and the block
    tables [seqs, blocks] of these. tables None: the keys are given with the call, one sequence after another. cross:
    cross attention, which it is without tables if rows and keys differ."""

    def __init__(self, q_start: np.ndarray, k_lens: np.ndarray, tables: Optional[np.ndarray], causal: bool,
                 cross: bool = False) -> None:
        # copies: the caller may overwrite its arrays, and a step is found by what they held
        self.q_start, self.k_lens = q_start.copy(), k_lens.copy()
        self.tables, self.causal = None if tables is None else tables.copy(), causal
        self.cross = cross or (tables is None and not np.array_equal(np.diff(q_start), k_lens))
        self.kind = "encoder_decoder" if self.cross else "decoder"

    def fill(self, batch: Batch) -> None:
        if self.cross:
            new = {"encoder_new_lens": self.k_lens} if self.tables is None else {}
            batch.set_block_tables(None, np.maximum(np.diff(self.q_start), 1).astype(np.int32), self.q_start,
                                   cross_block_tables=self.tables, encoder_lens=self.k_lens, **new)
            return
        extra = positions(self.q_start, self.k_lens) if self.tables is not None else {}
        if not self.causal:
            extra["causality"] = np.full(self.k_lens.size, abi.FOLIO_CAUSAL_NO, np.int32)
        batch.set_block_tables(self.tables, self.k_lens, self.q_start, **extra)


@dataclass
class CsrStep:
    """The same, where sequence i has the blocks blocks[indptr[i] : indptr[i + 1]]. indptr None: the keys are given with
    the call. more: further arrays of the batch."""

    query_start: np.ndarray
    seq_lens: np.ndarray
    indptr: Any
    blocks: np.ndarray
    more: dict

    def fill(self, batch: Batch) -> None:
        if self.indptr is None:
            batch.set_block_tables(None, self.seq_lens, self.query_start, **self.more)
        else:
            batch.set_csr(self.indptr, self.blocks, query_start=self.query_start, seq_lens=self.seq_lens, **self.more)


class Planned:
    """A plan with its batch, and the step that both hold. It serves one stream."""

    def __init__(self, attentions: Union[Attention, list], *, block_size: int, **options: Any) -> None:
        self.plan = Plan(attentions, block_size=block_size, **options)
        self.batch = Batch(self.plan.context, block_size=block_size)
        self.step: Any = None

    def update(self, step: Any) -> None:
        """Fills batch and plan. Callers leave it out where `step` is this one already: in all layers but the first."""
        self.step = None
        step.fill(self.batch)
        self.plan.update(self.batch)
        self.step = step


def _make_planned(at: Attention, kind: str, block_size: int, num_blocks: int, stream: Optional[int]) -> Planned:
    return Planned(at, types=kind, block_size=block_size, num_blocks=num_blocks,
                   cross_num_blocks=num_blocks if kind == "encoder_decoder" else 0)


def host_forward(at: Attention, step: HostStep, q: Any, out: Any, lse: Any, *, k: Any = None, v: Any = None,
                 cache: Optional[KVCache] = None, **more: Any) -> None:
    """Attention with a step in host memory. With a cache: over its blocks, after k and v (if given) were stored as the
    last keys of each sequence. Without one: over k and v, one sequence after another. more: what options() takes."""
    block_size, num_blocks = (cache.block_size, cache.num_blocks) if cache is not None else (0, 0)
    key = (at, step.kind, block_size, num_blocks, None if at.context.on_host else at.context.stream())
    planned = kept.plans.find(key, _make_planned, key)
    if planned.step is not step:
        planned.update(step)
    given = more and any(x is not None for x in more.values())
    tail, keep = options(at.context, at, **more) if given else (b"", None)
    run_layer(attention_forward, (planned.plan._handle, 0, TYPES[step.kind]), at.context, at, q, k, v, cache, 0,
              out, lse, tail)


def device_plan(at: Attention, block_size: int, num_blocks: int, seqs: int, tokens: int, query_len: int,
                longest: int, stream: Optional[int]) -> Planned:
    """A plan for update_device() on the current stream, `stream`. A plan that a CUDA graph was captured with stays for
    good, and serves only graphs."""
    one = query_len == 1  # launches nothing for prompts
    limits = (limit(seqs), limit(tokens), 1 if one else limit(min(query_len, tokens)), longest)
    key = (at, block_size, num_blocks, *limits)
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        planned = kept.captured.get(key)
        if planned is None:  # nothing can be allocated now: take one of the calls before, on whatever stream they were
            old = next((k for k in kept.plans if k[:-1] == key), None)
            if old is None:
                raise ArgumentError("there is no plan for this geometry yet, and none can be made while a CUDA graph "
                                    "is captured: call the function once before")
            planned = kept.captured[key] = kept.plans.pop(old)
            _for_good.append(planned)
            planned.step = False  # each graph has its own updates
        return planned
    return kept.plans.find((*key, stream), lambda: Planned(
        at, block_size=block_size, num_blocks=num_blocks, max_seqs=limits[0], max_query_tokens=limits[1],
        max_query_len=limits[2], max_seq_len=longest))
