"""Continuous batching, for all versions of transformers: the step of a layer group, and attention over it.

transformers tells where keys lie by lists of physical indices: read_index (all keys of all requests, one after
another) and write_index (the new ones). K and V are kept in the library's own format inside the same bytes, page by
page, so whatever transformers does with whole pages (forks, offloading) stays right. Pages become blocks:

    index  ->  page number, offset in the page  ->  block = page number * scale + sub[offset // block_size]

A request of a sliding group has a ring of pages: token t is at ring slot t mod window. block_size divides both the
page and the window, so the ring is a block table that starts in the middle of its first block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .._oneshot import MAX_BLOCK, CsrStep, Planned
from ..cache import KVCache
from ..context import torch_context
from ..errors import UnsupportedError
from ..plan import Plan
from .geometry import attention_of, check_inference, rows, sinks_of


@dataclass
class Pages:
    """How the pages of a layer group lie in memory."""

    row_stride: int  # physical indices from one page to the next
    block_size: int
    scale: int  # blocks from one page to the next
    sub: np.ndarray  # [blocks of a page] block of a page, counted from its first
    window: Optional[int]  # None: full attention

    def blocks(self, index: np.ndarray) -> np.ndarray:
        page, offset = np.divmod(index, self.row_stride)
        return (page * self.scale + self.sub[offset // self.block_size]).astype(np.int32)

    def slots(self, index: np.ndarray, trash: int) -> np.ndarray:
        offset = index % self.row_stride
        return np.where(index == trash, -1, self.blocks(index).astype(np.int64) * self.block_size
                        + offset % self.block_size)


def block_size_of(tokens: int, window: Optional[int]) -> int:
    """The block size for runs of `tokens` tokens in a page: it divides them and the window."""
    size = gcd(tokens, window) if window else tokens
    return size if size <= MAX_BLOCK else gcd(size, MAX_BLOCK)


@dataclass
class Tables(CsrStep):
    """A step as arrays."""

    write_slots: Optional[np.ndarray]  # given: attend over old and new keys first, then write the new ones here


def tables(pages: Pages, trash: int, query_start: np.ndarray, key_start: np.ndarray, read: np.ndarray,
           write: np.ndarray) -> Tables:
    """The block tables of a step. read is empty if no request has cached tokens."""
    size = pages.block_size
    new, keys = np.diff(query_start), np.diff(key_start)
    old = keys - new
    # Where in its first block the first cached key of a request lies; 0 unless its ring has wrapped.
    lead = np.zeros_like(keys)
    if pages.window and read.size:
        has = old > 0
        lead[has] = read[key_start[:-1][has]] % pages.row_stride % size
    lens = lead + keys
    counts = -(-lens // size)
    indptr = np.append(0, np.cumsum(counts)).astype(np.int32)
    seq = np.repeat(np.arange(counts.size), counts)  # of each block
    key = np.maximum((np.arange(seq.size) - indptr[seq]) * size - lead[seq], 0)  # the first key of each block
    cached = key < old[seq]
    index = np.zeros(key.size, np.int64)
    if read.size:
        index[cached] = read[(key_start[:-1][seq] + key)[cached]]
    fresh = ~cached
    index[fresh] = write[(query_start[:-1][seq] + key - old[seq])[fresh]]
    slots = None
    if pages.window and not ((new <= 1) | (keys <= pages.window)).all():
        # A new token takes the place of one that an earlier row still sees.
        slots = pages.slots(write, trash)
        index[index == trash] = 0  # never read: new keys come from the step itself
    return Tables(query_start.astype(np.int32), lens.astype(np.int32), indptr, pages.blocks(index), {}, slots)


class Group:
    """A layer group of one cache of transformers: its K and V, and the step it is in."""

    def __init__(self, pages: Pages, memory: list, num_blocks: int, kv_heads: int, head_size: int, dtype: torch.dtype,
                 trash: int) -> None:
        self.pages, self.trash = pages, trash
        self.kv = KVCache.wrap(memory, context=torch_context(memory[0].device), layout="native", num_blocks=num_blocks,
                               block_size=pages.block_size, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype)
        self.tables: Any = None
        self._planned: Optional[Planned] = None  # lists the attentions of all layers that have run
        self._step: Any = None

    def start_step(self, kwargs: dict[str, Any], index: int) -> None:
        """Reads a step's arrays from the arguments of a layer's call, for group number index. All layers of a step get
        the same list read_index, and every step a new one: so it is done once per step."""
        step = kwargs["read_index"]
        if self._step is step:
            return
        key_start = kwargs["cu_seq_lens_k"]
        if isinstance(key_start, dict):
            key_start = key_start["sliding_attention" if self.pages.window else "full_attention"]
        arrays = (kwargs["cu_seq_lens_q"], key_start, step[index], kwargs["write_index"][index])
        self.tables = tables(self.pages, self.trash, *(x.cpu().numpy() for x in arrays))
        self._step = step

    def planned(self, attention: Any) -> tuple[Plan, int]:
        """The plan, made anew for an attention that it does not list, and the attention's number in it."""
        planned = self._planned
        if planned is None or attention not in planned.plan.attentions:
            others = planned.plan.attentions if planned else ()
            planned = self._planned = Planned([*others, attention], block_size=self.pages.block_size, cache=self.kv)
        if planned.step is not self.tables:
            planned.update(self.tables)
        return planned.plan, planned.plan.attentions.index(attention)


_groups: WeakKeyDictionary = WeakKeyDictionary()  # cache of transformers -> {group index: Group}


def group_of(cache: Any, index: int, make_group: Callable, *arguments: Any) -> Group:
    """A group of a cache of transformers, made when its first layer runs."""
    groups = _groups.setdefault(cache, {})
    if index not in groups:
        groups[index] = make_group(cache, *arguments)
    return groups[index]


def attention_over(find: Callable) -> Callable:
    """The function of the attention interface. find(cache, layer_idx) knows how the cache of transformers arranges its
    pages: it gives the Group of a layer, the group's index in the arguments of a call, and the layer's number in it."""
    @torch.compiler.disable
    def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None, dropout: float = 0.0,
                  s_aux: Optional[torch.Tensor] = None, cache: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """query [1, heads, tokens, size], key and value [1, kv_heads, tokens, size]. Returns (out [1, tokens, heads,
        v_size], None)."""
        if cache is None:
            raise UnsupportedError("this attention implementation is for continuous batching (generate_batch); "
                                   'for forward and generate use "folio"')
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("steps cannot be captured in a CUDA graph: pass "
                                   "ContinuousBatchingConfig(use_cuda_graph=False)")
        group, index, layer = find(cache, module.layer_idx)
        group.start_step(kwargs, index)
        check_inference(module, (query, key, value), dropout)
        kv = group.kv
        if key.shape[1] != kv.num_kv_heads or key.shape[3] != kv.head_size or value.shape[3] != kv.v_head_size:
            raise UnsupportedError(f"keys have {key.shape[1]} heads of {key.shape[3]} and values of {value.shape[3]}; "
                                   f"the paged cache has room for {kv.num_kv_heads} heads of {kv.head_size}")
        plan, number = group.planned(attention_of(
            query.device, query.shape[1], key.shape[1], key.shape[3], value.shape[3], query.dtype, kv.dtype, scaling,
            group.pages.window, kwargs))
        q, k, v = rows(query), rows(key), rows(value)
        slots = group.tables.write_slots
        out = plan.forward(q, k, v, cache=kv, layer=layer, attention=number, sinks=sinks_of(module, s_aux),
                           append=slots is not None)
        if slots is not None:
            kv.write(layer, k, v, slots)
        return out.unsqueeze(0), None

    return attention
