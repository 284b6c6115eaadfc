"""Attention (one layer geometry) and Rotary (rotary embedding)."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from functools import partial
from typing import Any, Optional, Sequence

import numpy as np

from . import _abi as abi
from ._arrays import DTYPE_NAMES, address, dtype_of, host_array
from ._library import Handle, choice, create, integer, lib, make, pair
from .context import Context, given_or_default
from .errors import ArgumentError

TYPES = {"decoder": 0, "encoder": 1, "encoder_only": 2, "encoder_decoder": 3}
type_of = partial(choice, "attention type", TYPES)


class Attention(Handle):
    """One layer geometry. Layers of equal geometry share one.

    head_size     of q and k; v_head_size of v and out (None: the same)
    dtype         of q and out: "f32", "f16" or "bf16"; kv_dtype of the KV cache (None: the same)
    scale         of the scores; None: 1 / sqrt(head_size)
    window        (left, right): a row sees so many keys before and after its own position; -1: all.
                  A sliding window of W tokens is (W - 1, 0)
    soft_cap      scores become soft_cap * tanh(score / soft_cap)
    v_in_k        latent attention: V is the first v_head_size numbers of K
    """

    def __init__(self, context: Optional[Context] = None, *, num_heads: int, num_kv_heads: Optional[int] = None,
                 head_size: int, v_head_size: Optional[int] = None, dtype: Any = "f32", kv_dtype: Any = None,
                 scale: Optional[float] = None, window: Optional[Sequence[int]] = None,
                 soft_cap: Optional[float] = None, v_in_k: bool = False) -> None:
        self.context = given_or_default(context)
        desc = make(abi.folio_attention_desc, num_heads=num_heads, num_kv_heads=num_kv_heads or 0,
                    k_head_size=head_size, v_head_size=v_head_size or 0, dtype=dtype_of(dtype),
                    kv_dtype=dtype_of(kv_dtype) if kv_dtype is not None else 0, scale=scale or 0.0,
                    soft_cap=soft_cap or 0.0, v_in_k=int(v_in_k))
        left, right = (-1, -1) if window is None else pair(window, "window")
        if (left, right) != (-1, -1):
            desc.windowed, desc.window_left, desc.window_right = 1, left, right
        handle = create(lib.folio_attention_create, self.context, ctypes.byref(desc))
        super().__init__(handle, lib.folio_attention_destroy, self.context)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.v_head_size = head_size, v_head_size or head_size
        self.dtype, self.v_in_k = DTYPE_NAMES[desc.dtype], v_in_k
        self.row_size = num_heads * head_size  # of q

    def __repr__(self) -> str:
        return f"<folio.Attention {self.num_heads}:{self.num_kv_heads} heads of {self.head_size}, {self.dtype}>"


# the arguments of an Attention, by which the interfaces of other packages find one again
Geometry = namedtuple("Geometry", "num_heads num_kv_heads head_size v_head_size dtype kv_dtype scale window soft_cap "
                      "v_in_k", defaults=(False,))


def alibi_slopes(heads: int) -> np.ndarray:
    """f32 [heads]: powers of 2^(-8 / n) for the n heads up to a power of two, then odd powers of its root."""
    n = 1 << heads.bit_length() - 1
    return np.array([2.0 ** (-8 * i / n) for i in range(1, n + 1)]
                    + [2.0 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)], np.float32)


_SCALINGS = {"none": abi.FOLIO_ROTARY_SCALE_NONE, "linear": abi.FOLIO_ROTARY_SCALE_LINEAR,
             "ntk": abi.FOLIO_ROTARY_SCALE_NTK, "yarn": abi.FOLIO_ROTARY_SCALE_YARN,
             "llama3": abi.FOLIO_ROTARY_SCALE_LLAMA3}
_PAIRINGS = {"halves": abi.FOLIO_ROTARY_HALVES, "pairs": abi.FOLIO_ROTARY_PAIRS}


class Rotary(Handle):
    """Cosines and sines of a rotary embedding, for Plan.forward(rotary=...).

    pairing       "halves" (GPT-NeoX, Llama, Qwen) or "pairs" (GPT-J, DeepSeek)
    angles        by cos and sin [num_positions, num_dims / 2]; or frequencies [num_dims / 2]; or theta with a
                  scaling ("none", "linear", "ntk", "yarn", "llama3") and its fields, named as in folio_rotary_desc
    """

    def __init__(self, context: Optional[Context] = None, *, num_dims: int, num_positions: int, first_dim: int = 0,
                 pairing: str = "halves", theta: float = 0.0, scaling: str = "none", cos: Any = None, sin: Any = None,
                 frequencies: Any = None, **fields: Any) -> None:
        self.context = given_or_default(context)
        if pairing not in _PAIRINGS or scaling not in _SCALINGS:
            raise ArgumentError(f"pairing must be one of {', '.join(_PAIRINGS)}, "
                                f"and scaling one of {', '.join(_SCALINGS)}")
        for name in fields:
            if not hasattr(abi.folio_rotary_desc, name):
                raise TypeError(f"Rotary() has no argument {name!r}")
        integer(num_dims, "num_dims")
        half, keep = num_dims // 2, []
        for name, value, kind, shape in (("cos", cos, np.float32, (num_positions, half)),
                                         ("sin", sin, np.float32, (num_positions, half)),
                                         ("frequencies", frequencies, np.float64, (half,))):
            table = host_array(value, kind, name)
            if table is not None and table.shape != shape:
                raise ArgumentError(f"{name} has shape {table.shape}; it must be {shape}")
            fields[name] = address(table)
            keep.append(table)
        desc = make(abi.folio_rotary_desc, num_dims=num_dims, first_dim=first_dim, pairing=_PAIRINGS[pairing],
                    scaling=_SCALINGS[scaling], num_positions=num_positions, theta=theta, **fields)
        handle = create(lib.folio_rotary_create, self.context, ctypes.byref(desc))
        super().__init__(handle, lib.folio_rotary_destroy, self.context)
        self._desc, self._keep = desc, (self.context, keep)  # for a Passport
