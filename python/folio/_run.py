"""Arguments of calls that compute: tensors, scales, streams."""

from __future__ import annotations

import functools
import sys
from typing import Any, Optional

import numpy as np

from . import _abi as abi
from ._arrays import _BY_NAME, DTYPE_NAMES, TORCH_DTYPES, Array, array, host_array, is_torch, numpy_dtype
from ._library import handle_of, packer
from .context import Context
from .device import DeviceArray
from .errors import ArgumentError, UnsupportedError

_RUN = packer(abi.folio_run)


def run_of(context: Context, like: Any = None, stream: Optional[int] = None, workspace: Any = None) -> Optional[bytes]:
    """The folio_run of a call, or None for the defaults."""
    if workspace is None and context.on_host:
        return None
    if stream is None:
        stream = context.stream(like)
    memory, size = (0, 0) if workspace is None else (handle_of(workspace, DeviceArray, "workspace"), workspace.nbytes)
    return _RUN.pack(_RUN.size, stream or 0, memory, size)


class Torch:
    """Functions of torch that every call needs, once torch is there. Looking them up takes longer than calling them."""

    empty_like: Any = None

    @staticmethod
    def is_grad_enabled() -> bool:
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        setattr(Torch, "empty_like", torch.empty_like)
        setattr(Torch, "is_grad_enabled", torch.is_grad_enabled)
        return torch.is_grad_enabled()


def compiling() -> bool:
    """Whether torch.compile traces this call."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def refuse_gradients(*tensors: Any) -> None:
    """There is no backward pass: raises if one of these tensors requires a gradient. Call it in grad mode."""
    if any(getattr(t, "requires_grad", False) for t in tensors):
        raise UnsupportedError("q, k or v requires a gradient, but there is no backward pass: call this under "
                               "torch.no_grad() or torch.inference_mode()")


def place_check(context: Context, a: Array, name: str) -> None:
    if a.device != context.place:
        raise ArgumentError(f"{name} is on {a.device[0]}:{a.device[1]}, but the context is on "
                            f"{context.place[0]}:{context.place[1]}")


def rows(context: Context, value: Any, name: str, heads: int, head_size: int, written: bool = False,
         stream: Optional[int] = None) -> tuple:
    """The fields of a folio_tensor (data, dtype, tokens, token stride, head stride), then what keeps data alive.

    value is [tokens, heads, head_size] or [tokens, heads * head_size], or [seqs, rows, heads, head_size] with one
    stride between rows."""
    if type(value) is np.ndarray:  # would raise an exception below, which costs 0.6 us
        return _any_rows(context, value, name, heads, head_size, written, stream)
    try:  # a torch tensor with three or four dims: by far the most frequent, and each attribute costs 0.1 us
        if value.is_cpu if context.on_host else value.is_cuda and value.get_device() == context.place[1]:
            shape = value.shape
            if len(shape) == 3:
                tokens, count, size = shape
                token_stride, head_stride, last = value.stride()
            else:
                (tokens, count, size), (token_stride, head_stride, last) = _joined(shape, value.stride())
            if (count == heads and size == head_size and last == 1 and token_stride > 0 and head_stride > 0
                    and not value.is_neg()):
                if heads == 1:  # the stride of a dim of 1 may be anything
                    head_stride = head_size
                if tokens == 1:
                    token_stride = heads * head_stride
                return value.data_ptr(), TORCH_DTYPES[value.dtype], tokens, token_stride, head_stride, None
    except (AttributeError, KeyError, ValueError, RuntimeError):
        # another library's, a dtype that was not seen yet, other dims, sparse
        pass
    return _any_rows(context, value, name, heads, head_size, written, stream)


def _joined(shape: Any, strides: Any) -> tuple:
    """Shape and strides of [seqs, rows, heads, head_size] as [tokens, heads, head_size]; ValueError for others."""
    seqs, each, heads, size = shape
    outer, inner, head, last = strides
    if each != 1 and seqs != 1 and outer != each * inner:
        raise ValueError
    return (seqs * each, heads, size), (outer if each == 1 else inner, head, last)


def _any_rows(context: Context, value: Any, name: str, heads: int, head_size: int, written: bool,
              stream: Optional[int]) -> tuple:
    a = array(value, stream)
    place_check(context, a, name)
    if written and not a.writable:
        raise ArgumentError(f"{name} is read-only")
    dtype = _BY_NAME.get(a.dtype)
    if dtype is None:
        raise ArgumentError(f"{name} has dtype {a.dtype}; it must be f32, f16 or bf16")
    shape, strides = a.shape, a.strides
    if len(shape) == 4:
        try:
            shape, strides = _joined(shape, strides)
        except ValueError:
            pass
    rank = len(shape)
    if rank == 3 and shape[1] == heads and shape[2] == head_size:
        tokens = shape[0]
        token_stride, head_stride, last = strides
    elif rank == 2 and shape[1] == heads * head_size:
        tokens, head_stride = shape[0], head_size
        token_stride, last = strides
    else:
        raise ArgumentError(f"{name} has shape {tuple(shape)}; it must be [tokens, {heads}, {head_size}] "
                            f"or [tokens, {heads * head_size}]")
    keep = None if is_torch(value) else a.owner
    if not tokens:  # then strides may be anything
        return a.data, dtype, 0, heads * head_size, head_size, keep
    if last != 1 and head_size > 1:
        raise ArgumentError(f"{name}: the numbers of one head are {last} elements apart; they must be contiguous")
    if heads == 1:
        head_stride = head_size
    if tokens <= 1:
        token_stride = heads * head_stride
    if token_stride <= 0 or head_stride <= 0:
        raise ArgumentError(f"{name} has strides {tuple(strides)}; they must be positive")
    return a.data, dtype, tokens, token_stride, head_stride, keep


def tensor(context: Context, value: Any, name: str, heads: int, head_size: int) -> tuple:
    """(folio_tensor, what keeps its data alive); see rows()."""
    fields = rows(context, value, name, heads, head_size)
    return abi.folio_tensor(*fields[:5]), (value, fields[5])


def lse_array(context: Context, value: Any, name: str, tokens: int, heads: int, written: bool = False,
              stream: Optional[int] = None) -> Array:
    """An f32 array [tokens, heads] with positive strides."""
    a = array(value, stream)
    place_check(context, a, name)
    if a.dtype != "float32" or tuple(a.shape) != (tokens, heads):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {tuple(a.shape)}; it must be f32 "
                            f"[{tokens}, {heads}]")
    if written and not a.writable:
        raise ArgumentError(f"{name} is read-only")
    if tokens and any(n > 1 and s <= 0 for n, s in zip(a.shape, a.strides)):
        raise ArgumentError(f"{name} has strides {tuple(a.strides)}; they must be positive")
    return a


def floats(context: Context, value: Any, name: str, count: int) -> tuple:
    """(address, owner) of a contiguous f32 array [count] where the context's tensors lie."""
    if value is None:
        return 0, None
    if context.place[0] == "cpu" and not is_torch(value):
        value = host_array(value, np.float32, name)
    a = array(value)
    place_check(context, a, name)
    if a.dtype != "float32" or tuple(a.shape) != (count,) or (count > 1 and a.strides != (1,)):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {tuple(a.shape)}; it must be f32 [{count}], "
                            "contiguous")
    return a.data, a.owner


def empty(context: Context, shape: tuple, dtype: int, like: Any) -> Any:
    """A new array of the library that `like` comes from; NumPy on the CPU if that library's arrays are read-only."""
    if is_torch(like):
        return like.new_empty(shape, dtype=_torch_dtype(dtype))
    package = type(like).__module__.partition(".")[0]
    if package == "cupy":
        import cupy

        return cupy.empty(shape, numpy_dtype(dtype))
    if context.place[0] == "cpu":
        return np.empty(shape, numpy_dtype(dtype))
    return DeviceArray(context, shape, DTYPE_NAMES[dtype])


@functools.cache
def _torch_dtype(dtype: int) -> Any:
    return getattr(sys.modules["torch"], numpy_dtype(dtype).name)
