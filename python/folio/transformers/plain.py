"""The plain attention interface of transformers: q over all the keys and values of a call.

    query [batch, heads, queries, size], key and value [batch, kv_heads, keys, size] of any cache of transformers

K and V are wrapped where they lie: a sequence is one block of all its keys. A mask is compared with what the library
does without one (causal, window, all keys); only what differs becomes a bias: one number per key for padding, a matrix
for any other mask.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from .. import _oneshot
from .._arrays import array
from .geometry import attention_of, check_inference, rows, sinks_of


class Visible(NamedTuple):
    """What the rows of a call see."""

    start: int  # keys [start, end) are visible to some row
    end: int
    causal: bool  # row i of n sees keys up to end - n + i
    window: Optional[int]
    bias: Optional[torch.Tensor]  # added to the scores of keys [start, end), [batch, 1 or heads, 1 or queries, keys]


def _hidden(seen: torch.Tensor) -> torch.Tensor:
    """0 where a key is seen, -inf elsewhere."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _key_bias(some: torch.Tensor) -> Optional[torch.Tensor]:
    """The bias of padding, from [batch, keys]: is a key visible to some row?"""
    return None if bool(some.all()) else _hidden(some)[:, None, None, :]


def read_mask(mask: Optional[torch.Tensor], queries: int, keys: int, causal: bool, window: Optional[int]) -> Visible:
    """A mask of transformers (bool: True is visible; float: added) as causality, window and a bias."""
    if mask is None:
        if causal and queries > 1:
            return Visible(0, min(keys, queries), True, window, None)  # more keys: a static cache not yet filled
        return Visible(0, keys, causal, None, None)
    mask = mask[..., :keys]
    if mask.dtype != torch.bool:
        return Visible(0, keys, False, None, mask)
    if mask.shape[1] != 1:
        return Visible(0, keys, False, None, _hidden(mask))
    mask = mask[:, 0]
    some = mask.any(1)
    where = some.any(0).nonzero()
    start, end = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, keys)
    if queries == 1:
        return Visible(start, end, causal, None, _key_bias(some[:, start:end]))
    if causal and end >= queries:
        position = torch.arange(keys, device=mask.device)
        distance = torch.arange(end - queries, end, device=mask.device)[:, None] - position
        pattern = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if torch.equal(mask, pattern & some[:, None, :]):
            return Visible(0, end, True, window, _key_bias(some[:, :end]))
    if torch.equal(mask, some[:, None, :].expand_as(mask)):
        return Visible(start, end, False, None, _key_bias(some[:, start:end]))
    return Visible(start, end, False, None, _hidden(mask[:, None, :, start:end]))


def _visible(mask: Optional[torch.Tensor], *key: Any) -> Visible:
    if mask is None:
        return read_mask(mask, *key)
    key = (*key, mask._version)
    masks = _oneshot.kept.masks
    for reference, known, visible in masks:
        if reference() is mask and known == key:
            return visible
    visible = read_mask(mask, *key[:-1])
    _oneshot.kept.masks = [*masks[-3:], (weakref.ref(mask), key, visible)]
    return visible


@torch.compiler.disable
def plain_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None, dropout: float = 0.0,
                    sliding_window: Optional[int] = None, is_causal: Optional[bool] = None,
                    s_aux: Optional[torch.Tensor] = None, position_bias: Optional[torch.Tensor] = None,
                    slopes: Optional[torch.Tensor] = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The function of the attention interface. Returns (out [batch, queries, heads, v_size], None)."""
    check_inference(module, (query, key, value), dropout)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    batch_size, heads, queries, size = query.shape
    seen = _visible(attention_mask, queries, key.shape[2], bool(causal), sliding_window)
    if seen.end - seen.start < key.shape[2]:
        key, value = key[:, :, seen.start:seen.end], value[:, :, seen.start:seen.end]
    bias = seen.bias
    if position_bias is not None:
        position_bias = position_bias[..., seen.start:seen.end]
        bias = position_bias if bias is None else position_bias + bias
    attention = attention_of(query.device, heads, key.shape[1], size, value.shape[3], query.dtype, key.dtype, scaling,
                             seen.window, kwargs)
    sinks, keys = sinks_of(module, s_aux), key.shape[2]
    out = query.new_empty((batch_size, queries, heads, value.shape[3]))
    # long sequences one by one: blocks of several then have no common stride
    count = 1 if keys > _oneshot.MAX_BLOCK else batch_size
    for i in range(0, batch_size, count):
        part = slice(i, i + count)
        # [batch, keys, heads, size]; they keep copies alive until the end
        k_rows, v_rows = (array((x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2))
                          for x in (key[part], value[part]))
        cache, width = _oneshot.cache_rows(attention.context, k_rows, v_rows)
        # not causal: as cross attention, which may have fewer keys than rows
        step = _oneshot.kept.steps.find(("plain", count, queries, keys, seen.causal), lambda: _oneshot.HostStep(
            np.arange(count + 1, dtype=np.int32) * queries, np.full(count, keys, np.int32),
            np.arange(count * width, dtype=np.int32).reshape(count, width), seen.causal, cross=not seen.causal))
        _oneshot.host_forward(attention, step, rows(query[part]), out[part], None, cache=cache, sinks=sinks,
                              bias=bias if bias is None or bias.shape[0] == 1 else bias[part], slopes=slopes)
    return out, None
