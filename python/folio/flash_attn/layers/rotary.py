"""apply_rotary_emb of FlashAttention, for torch tensors and NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any, Optional

import numpy as np

from ..._arrays import is_torch


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False,
                     seqlen_offsets: Any = 0, cu_seqlens: Any = None, max_seqlen: Optional[int] = None) -> Any:
    """x with the first numbers of each head turned. x [seqs, rows, heads, size], or with cu_seqlens [seqs + 1] [total,
    heads, size]. cos, sin [positions, rotary_size / 2]. Row j of sequence i is at position seqlen_offsets[i] + j;
    seqlen_offsets may be a number. inplace: x itself is changed. Sums are in f32. max_seqlen is not needed."""
    flat = x if cu_seqlens is not None else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    starts = cu_seqlens if cu_seqlens is not None else count(x, x.shape[0] + 1) * x.shape[1]
    base = count(x, len(starts) - 1) * 0 + seqlen_offsets
    turned = rotate(flat, cos, sin, places(starts, base, flat.shape[0])[1], interleaved).reshape(x.shape)
    if inplace:
        x[...] = turned
    return x if inplace else turned


def count(like: Any, n: int) -> Any:
    """int32 0, 1, ... n - 1 where a tensor is; else a NumPy array."""
    if is_torch(like):
        return sys.modules["torch"].arange(n, dtype=sys.modules["torch"].int32, device=like.device)
    return np.arange(n, dtype=np.int32)


def places(starts: Any, base: Any, rows: int, step: int = 1) -> tuple:
    """(sequence, place) of each row. Sequence i has the rows from starts[i] on; its row j is at base[i] + j * step."""
    row, last = count(starts, rows), len(starts) - 2
    if is_torch(starts):
        seq = (sys.modules["torch"].searchsorted(starts.int(), row, right=True) - 1).clip(0, last)
    else:
        seq = (np.searchsorted(starts, row, side="right") - 1).clip(0, last)
    return seq, base[seq] + (row - starts[seq]) * step


def rotate(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """A copy of x [..., heads, size], turned by the rows of cos and sin at positions [...]."""
    half = cos.shape[-1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half),
                                                                                        slice(half, 2 * half))
    a, b = _f32(x[..., first]), _f32(x[..., second])
    c, s = _f32(cos[positions])[..., None, :], _f32(sin[positions])[..., None, :]
    out = x.clone() if is_torch(x) else x.copy()
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


def _f32(x: Any) -> Any:
    return x.float() if is_torch(x) else np.asarray(x, np.float32)
