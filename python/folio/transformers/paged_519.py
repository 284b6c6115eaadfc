"""Continuous batching of transformers 5.18 to 5.23.

One tensor of bytes holds all layers. For a group of n layers, a page of a layer has room for the K and the V of
page_size tokens:

    [ page of layer 0 | page of layer 1 | ... | page of layer n - 1 ]   one block of transformers, n pages
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .paged import Group, Pages, attention_over, block_size_of, group_of


def _wrap(cache: Any, allocator: Any) -> Group:
    memory, window = cache.cache_tensor, getattr(allocator, "sliding_window", None)
    layers, page = len(allocator.layer_indices), allocator.tokens_per_page
    size = block_size_of(page, window)
    per_page = page // size
    pages = Pages(row_stride=allocator.block_physical_stride, block_size=size, scale=layers * per_page,
                  sub=np.arange(per_page), window=window)
    page_bytes = allocator.bytes_per_page
    num_pages = memory.numel() // page_bytes - (layers - 1)  # from each layer's first page on
    views = [memory[i * page_bytes:(i + num_pages) * page_bytes] for i in range(layers)]
    return Group(pages, views, num_pages * per_page, allocator.num_key_value_heads, allocator.head_dim,
                 allocator.cache_dtype, allocator.write_trash_index)


def _find(cache: Any, layer_idx: int) -> tuple[Group, int, int]:
    allocator = cache.layer_to_allocator[layer_idx]
    group = group_of(cache, allocator.index, _wrap, allocator)
    return group, allocator.index, allocator.layer_indices.index(layer_idx)


attention = attention_over(_find)
