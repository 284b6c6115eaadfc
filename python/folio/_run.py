"""Arguments of calls that compute: tensors, scales, streams."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

import numpy as np

from . import _abi as abi
from ._arrays import DTYPE_NAMES, Array, array, is_torch, numpy_dtype
from ._arrays import _BY_NAME as _DTYPE_BY_NAME
from ._library import make
from .context import Context
from .errors import ArgumentError


def run_of(context: Context, like: Any = None, stream: Optional[int] = None) -> Any:
    """The folio_run of a call, or None for the defaults."""
    if context.place[0] == "cpu":
        return None
    return ctypes.byref(make(abi.folio_run, stream=stream if stream is not None else context.stream(like)))


def place_check(context: Context, a: Array, name: str) -> None:
    if a.device != context.place:
        raise ArgumentError(f"{name} is on {a.device[0]}:{a.device[1]}, but the context is on "
                            f"{context.place[0]}:{context.place[1]}")


def tensor(context: Context, value: Any, name: str, heads: int, head_size: int, *, written: bool = False,
           stream: Optional[int] = None) -> tuple:
    """(folio_tensor, Array) of [tokens, heads, head_size] or [tokens, heads * head_size]."""
    a = array(value, stream)
    if a.device != context.place:
        place_check(context, a, name)
    if written and not a.writable:
        raise ArgumentError(f"{name} is read-only")
    dtype = _DTYPE_BY_NAME.get(a.dtype)
    if dtype is None:
        raise ArgumentError(f"{name} has dtype {a.dtype}; numbers are f32, f16 or bf16")
    shape, strides = a.shape, a.strides
    rank = len(shape)
    if rank == 3 and shape[1] == heads and shape[2] == head_size:
        tokens, token_stride, head_stride, last = shape[0], strides[0], strides[1], strides[2]
    elif rank == 2 and shape[1] == heads * head_size:
        tokens, token_stride, head_stride, last = shape[0], strides[0], head_size, strides[1]
    else:
        raise ArgumentError(f"{name} has shape {tuple(shape)}; it must be [tokens, {heads}, {head_size}] "
                            f"or [tokens, {heads * head_size}]")
    if last != 1 and head_size > 1:
        raise ArgumentError(f"{name}: the numbers of one head are {last} elements apart; they must be contiguous")
    if heads == 1:
        head_stride = head_size
    if tokens <= 1:
        token_stride = 0
    elif token_stride <= 0 or head_stride <= 0:
        raise ArgumentError(f"{name} has strides {tuple(strides)}; they must be positive")
    return abi.folio_tensor(a.data, dtype, tokens, token_stride, head_stride), a


def floats(context: Context, value: Any, name: str, count: int) -> tuple:
    """(address, owner) of a contiguous f32 array [count] where the context's tensors lie."""
    if value is None:
        return None, None
    if context.place[0] == "cpu" and not is_torch(value):
        value = np.ascontiguousarray(value, np.float32)
    a = array(value)
    place_check(context, a, name)
    if a.dtype != "float32" or tuple(a.shape) != (count,) or (count > 1 and a.strides != (1,)):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {tuple(a.shape)}; it must be f32 [{count}], contiguous")
    return a.data, a.owner


def empty(context: Context, shape: tuple, dtype: int, like: Any) -> Any:
    """A new array of the library that `like` comes from; NumPy on the CPU if that library's arrays cannot be written."""
    if is_torch(like):
        import torch

        return torch.empty(shape, dtype=_torch_dtype(dtype), device=like.device)
    package = type(like).__module__.partition(".")[0]
    if package == "cupy":
        import cupy

        return cupy.empty(shape, numpy_dtype(dtype))
    if context.place[0] == "cpu":
        return np.empty(shape, numpy_dtype(dtype))
    from .device import DeviceArray

    return DeviceArray(context, shape, DTYPE_NAMES[dtype])


def _torch_dtype(dtype: int) -> Any:
    import torch

    return getattr(torch, numpy_dtype(dtype).name)
