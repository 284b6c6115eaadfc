"""Continuous batching of transformers 5.17.

K and V of layer j of every group are two tensors [(blocks + 2) * block_size, kv_heads, size]. They are replaced once
by the halves of one tensor, because a block of the library holds K and V. The first half of a page's tokens, K and V,
then lies in the page's bytes of the K tensor, the second half in those of the V tensor.
"""

from __future__ import annotations

from typing import Any, Optional
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..cache import KVCache
from ..context import torch_context
from ..errors import UnsupportedError
from .paged import Group, Pages, attention_over, block_size_of

_groups: WeakKeyDictionary = WeakKeyDictionary()  # cache of transformers -> {group index: Group}


def _join(cache: Any) -> list[torch.Tensor]:
    """One tensor per layer of a group, whose halves are the cache's K and V tensors from now on."""
    joined = []
    for j, k in enumerate(cache.key_cache):
        both = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device)
        cache.key_cache[j], cache.value_cache[j] = both[0], both[1]
        joined.append(both)
    return joined


def _group(cache: Any, index: int, layer_idx: int) -> Group:
    groups = _groups.get(cache)
    if groups is None:
        if cache.block_size % 2:
            raise UnsupportedError(f"block_size is {cache.block_size}; it must be even")
        groups = _groups[cache] = {"memory": _join(cache)}
    group = groups.get(index)
    if group is None:
        window = cache.sliding_windows[layer_idx]
        group = groups[index] = _wrap(cache, groups["memory"], None if window == 1 else window)
    return group


def _wrap(cache: Any, memory: list[torch.Tensor], window: Optional[int]) -> Group:
    context = torch_context(memory[0].device)
    half = cache.block_size // 2
    size = block_size_of(half, window)
    per_half, num_pages = half // size, cache.cache_shape[0] // cache.block_size
    first = np.arange(per_half)
    pages = Pages(row_stride=cache.block_size, block_size=size, scale=per_half,
                  sub=np.concatenate([first, num_pages * per_half + first]), window=window)
    kv = KVCache.wrap(memory, context=context, layout="native", block_size=size, num_blocks=2 * num_pages * per_half,
                      num_kv_heads=cache.num_key_value_heads, head_size=cache.head_dim, dtype=cache.dtype)
    return Group(pages, kv, cache.dtype, cache.write_trash_index)


def _find(cache: Any, layer_idx: int) -> tuple[Group, int, int]:
    index, layer = cache.layer_index_to_group_indices[layer_idx]
    return _group(cache, index, layer_idx), index, layer


attention = attention_over(_find)
