"""Passport: what a cache cannot know of its K and V. Stores and exported blocks carry it."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

import numpy as np

from . import _abi as abi
from ._arrays import address, host_array
from ._library import handle_of, make
from .attention import Rotary
from .errors import ArgumentError


class Passport:
    """What K and V are. A store or an export with another passport is rejected, with the name of the field.

    model     names weights, adapters and all else that K and V depend on; up to 255 bytes
    rotary    how the stored keys were rotated
    k_scales  static scales of an fp8 cache: one, or one per layer or head; v_scales: as many
    """

    def __init__(self, model: str = "", *, rotary: Optional[Rotary] = None, k_scales: Any = None,
                 v_scales: Any = None) -> None:
        if not isinstance(model, str) or "\0" in model:
            raise ArgumentError(f"model is {model!r}; it must be a string without null characters")
        if rotary is not None:
            handle_of(rotary, Rotary, "rotary")
        k, v = _scales(k_scales, "k_scales"), _scales(v_scales, "v_scales")
        if k is not None and v is not None and k.size != v.size:
            raise ArgumentError(f"k_scales has {k.size} numbers, but v_scales has {v.size}")
        given = k if k is not None else v
        self._struct = make(abi.folio_kv_passport, model=model.encode(), k_scales=address(k), v_scales=address(v),
                            rotary=None if rotary is None else ctypes.addressof(rotary._desc),
                            num_scales=0 if given is None else given.size)
        self._keep = (rotary, k, v)
        self.model = model

    def __repr__(self) -> str:
        return f"<folio.Passport {self.model!r}>"


def _scales(value: Any, name: str) -> Optional[np.ndarray]:
    given = host_array(value, np.float32, name)
    return None if given is None else np.array(given).reshape(-1)


def passport_of(value: Any) -> Optional[int]:
    """The address of an argument that must be a Passport or None."""
    if value is None:
        return None
    if not isinstance(value, Passport):
        raise ArgumentError(f"passport is {type(value).__name__} {value!r}; it must be a folio.Passport")
    return ctypes.addressof(value._struct)


def key_of(key: Any) -> tuple[Any, int]:
    """A copy of secret bytes for a call, and how many they are. None: (None, 0)."""
    if key is None:
        return None, 0
    try:
        given = bytes(memoryview(key))
    except TypeError:
        raise ArgumentError(f"a key is {type(key).__name__}; it must be bytes") from None
    return ctypes.create_string_buffer(given, max(len(given), 1)), len(given)
