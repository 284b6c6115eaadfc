"""Continuous batching of transformers 5.17.

K and V of layer j of every group are two tensors [(blocks + 2) * block_size, kv_heads, size]. They are replaced once
by the halves of one tensor, because a block of the library holds K and V. The first half of a page's tokens, K and V,
then lies in the page's bytes of the K tensor, the second half in those of the V tensor.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..errors import UnsupportedError
from .paged import Group, Pages, attention_over, block_size_of, group_of

_joined: WeakKeyDictionary = WeakKeyDictionary()  # cache of transformers -> its memory


def _join(cache: Any) -> list[torch.Tensor]:
    """One tensor per layer of a group, whose halves are the cache's K and V tensors from now on."""
    if cache.block_size % 2:
        raise UnsupportedError(f"block_size is {cache.block_size}; it must be even")
    joined = []
    for j, k in enumerate(cache.key_cache):
        both = torch.empty((2, *k.shape), dtype=k.dtype, device=k.device)
        cache.key_cache[j], cache.value_cache[j] = both[0], both[1]
        joined.append(both)
    return joined


def _wrap(cache: Any, layer_idx: int) -> Group:
    if cache not in _joined:
        _joined[cache] = _join(cache)
    half, window = cache.block_size // 2, cache.sliding_windows[layer_idx]
    window = None if window == 1 else window
    size = block_size_of(half, window)
    per_half, num_pages = half // size, cache.cache_shape[0] // cache.block_size
    first = np.arange(per_half)
    pages = Pages(row_stride=cache.block_size, block_size=size, scale=per_half,
                  sub=np.concatenate([first, num_pages * per_half + first]), window=window)
    return Group(pages, _joined[cache], 2 * num_pages * per_half, cache.num_key_value_heads, cache.head_dim,
                 cache.dtype, cache.write_trash_index)


def _find(cache: Any, layer_idx: int) -> tuple[Group, int, int]:
    index, layer = cache.layer_index_to_group_indices[layer_idx]
    return group_of(cache, index, _wrap, layer_idx), index, layer


attention = attention_over(_find)
