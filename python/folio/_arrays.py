"""Arrays of any library as the C side sees them: address, dtype, shape and strides, without a copy.

NumPy arrays and torch tensors are read directly, all others through DLPack (JAX, CuPy, ...).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple, Optional, Sequence

import ml_dtypes
import numpy as np

from . import _abi as abi
from .errors import ArgumentError

# name, folio_dtype, NumPy's type, DLPack's code and bits
_DTYPES = [
    ("f32", abi.FOLIO_F32, np.dtype(np.float32), (2, 32)),
    ("f16", abi.FOLIO_F16, np.dtype(np.float16), (2, 16)),
    ("bf16", abi.FOLIO_BF16, np.dtype(ml_dtypes.bfloat16), (4, 16)),
    ("fp8_e4m3", abi.FOLIO_FP8_E4M3, np.dtype(ml_dtypes.float8_e4m3fn), (10, 8)),
    ("fp8_e5m2", abi.FOLIO_FP8_E5M2, np.dtype(ml_dtypes.float8_e5m2), (12, 8)),
    ("int8", abi.FOLIO_INT8, np.dtype(np.int8), (0, 8)),
    ("f64", abi.FOLIO_F64, np.dtype(np.float64), (2, 64)),
]
DTYPE_NAMES = {value: name for name, value, *_ in _DTYPES}
DLPACK_TYPES = {value: code for _, value, _, code in _DTYPES}
_NUMPY = {value: kind for _, value, kind, _ in _DTYPES}
_BY_NAME = {name: value for name, value, *_ in _DTYPES} | {kind.name: value for _, value, kind, _ in _DTYPES}
_BY_NUMPY = {kind: value for _, value, kind, _ in _DTYPES}
# also: types of index arrays, which have no folio_dtype
_DLPACK_NAMES = {code: kind.name for _, _, kind, code in _DTYPES} | {(0, 32): "int32", (0, 64): "int64",
                                                                     (1, 8): "uint8"}

CPU = ("cpu", 0)


class Array(NamedTuple):
    """An array of another library. `owner` keeps its memory alive."""

    data: int
    dtype: str  # NumPy's name of it
    shape: tuple
    strides: tuple  # in elements
    device: tuple  # ("cpu", 0) or ("cuda", number)
    owner: Any
    writable: bool


def dtype_of(value: Any) -> int:
    """The folio_dtype of a name ("bf16", "bfloat16"), a NumPy dtype or a torch dtype."""
    if isinstance(value, int) and value in DTYPE_NAMES:
        return value
    name = value if isinstance(value, str) else str(value).rpartition(".")[2]
    found = _BY_NAME.get(name)
    if found is None:
        try:
            found = _BY_NUMPY.get(np.dtype(value))
        except TypeError:
            pass
    if found is None:
        raise ArgumentError(f"dtype {value!r} is not one of {', '.join(DTYPE_NAMES.values())}")
    return found


def numpy_dtype(dtype: int) -> np.dtype:
    return _NUMPY[dtype]


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


TORCH_DTYPES: dict = {}  # folio_dtype of a torch dtype, for those that were seen
_torch_names: dict = {}
_new = tuple.__new__  # of a NamedTuple: in half of the time


def _torch_array(tensor: Any) -> Array:
    dtype = tensor.dtype
    name = _torch_names.get(dtype)
    if name is None:
        name = _torch_names[dtype] = str(dtype).rpartition(".")[2]
        if name in _BY_NAME:
            TORCH_DTYPES[dtype] = _BY_NAME[name]
    if tensor.is_cpu:
        place = CPU
    elif tensor.is_cuda:
        place = "cuda", tensor.get_device()  # its device is an object that is made anew
    else:
        place = tensor.device.type, tensor.device.index or 0
    if tensor.is_neg():
        raise ArgumentError("the tensor's memory holds the negative of its numbers (torch's negative bit): pass "
                            "tensor.resolve_neg()")
    try:
        return _new(Array, (tensor.data_ptr(), name, tensor.shape, tensor.stride(), place, tensor, True))
    except RuntimeError:  # sparse, nested and others
        raise ArgumentError(f"the tensor has layout {tensor.layout}; it must be a dense tensor with strides") from None


_numpy_names: dict = {}  # NumPy makes the name of a dtype anew each time, which takes 5 us


def _numpy_array(value: np.ndarray) -> Array:
    dtype = value.dtype
    name = _numpy_names.get(dtype)
    if name is None:
        if not dtype.isnative:
            raise ArgumentError(f"the array has dtype {dtype.str}: its bytes are in the order of other machines")
        name = _numpy_names[dtype] = dtype.name
    size, strides = dtype.itemsize, []
    if size == 0:
        raise ArgumentError(f"the array has dtype {dtype.str}, whose elements have no bytes")
    for step in value.strides:
        if step % size:
            raise ArgumentError(f"the array's strides {value.strides} are not multiples of its {size}-byte numbers")
        strides.append(step // size)
    return Array(value.__array_interface__["data"][0], name, value.shape, tuple(strides), CPU, value,
                 value.flags.writeable)


def array(value: Any, stream: Optional[int] = None) -> Array:
    """Any array, without a copy. `stream` is the CUDA stream on which it will be used."""
    if is_torch(value):
        return _torch_array(value)
    if isinstance(value, np.ndarray):
        return _numpy_array(value)
    if hasattr(value, "__dlpack__"):
        return _dlpack_array(value, stream)
    raise ArgumentError(f"{type(value).__name__} is not an array: pass a NumPy array, a torch tensor, "
                        "or an object with __dlpack__")


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _DLVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

_DL_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3: pinned host memory, 13: managed memory
_DL_READ_ONLY = 1


def _dlpack_array(value: Any, stream: Optional[int]) -> Array:
    kind, number = value.__dlpack_device__()
    place = _DL_DEVICES.get(int(kind))
    if place is None:
        raise ArgumentError(f"the array's DLPack device {int(kind)} is neither a CPU nor an NVIDIA GPU")
    options = {} if place == "cpu" else {"stream": stream or 1}  # 1: CUDA's legacy default stream
    try:
        capsule = value.__dlpack__(max_version=(1, 0), **options)
    except (TypeError, BufferError):
        capsule = value.__dlpack__(**options)  # a producer of DLPack before 1.0
    writable = True
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:  # what follows the version may be anything
            raise ArgumentError(f"the array's DLPack version is {versioned.major}.{versioned.minor}; it must be 1.x")
        tensor, writable = versioned.tensor, not versioned.flags & _DL_READ_ONLY
    elif _is_valid(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    else:
        raise ArgumentError(f"{type(value).__name__}.__dlpack__() gave no DLPack capsule, or one that was used already")
    if (tensor.device_type, tensor.device_id) != (int(kind), number):
        raise ArgumentError(f"the array's DLPack capsule is on device {tensor.device_type}:{tensor.device_id}, but "
                            f"__dlpack_device__() gives {int(kind)}:{number}")
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        writable = False  # JAX arrays never change, whatever the capsule says
    name = _DLPACK_NAMES.get((tensor.code, tensor.bits))
    if name is None or tensor.lanes != 1:
        raise ArgumentError(f"the array's DLPack type (code {tensor.code}, {tensor.bits} bits) is not supported")
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else contiguous(shape)
    # The capsule was not consumed: when it goes, it calls the producer's deleter.
    device = (place, number if place == "cuda" else 0)
    return Array((tensor.data or 0) + tensor.byte_offset, name, shape, strides, device,
                 (value, capsule), writable)


def contiguous(shape: Sequence[int]) -> tuple:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def is_contiguous(a: Array) -> bool:
    return all(n == 1 or step == wanted for n, step, wanted in zip(a.shape, a.strides, contiguous(a.shape)))


def required_array(value: Any, dtype: Any, name: str) -> np.ndarray:
    """host_array of a value that must be given."""
    result = host_array(value, dtype, name)
    if result is None:
        raise ArgumentError(f"{name} is missing")
    return result


def own_array(value: Any, dtype: Any, name: str) -> np.ndarray:
    """A copy of required_array: what was checked is what is read, also if another thread writes to the caller's."""
    return np.array(required_array(value, dtype, name))


def host_array(value: Any, dtype: Any, name: str) -> Optional[np.ndarray]:
    """A contiguous NumPy array of this dtype from a list or any array in host memory; copied if need be. None: None."""
    if value is None:
        return None
    if type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
        return value
    if is_torch(value):
        if not value.is_cpu:
            raise ArgumentError(f"{name} must be in host memory")
        try:
            value = value.numpy()
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"{name} cannot be read: {str(error).splitlines()[0]}") from None
        if value.dtype == dtype and value.flags.c_contiguous:
            return value
    elif not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        if array(value).device != CPU:
            raise ArgumentError(f"{name} must be in host memory")
        value = np.from_dlpack(value)
    try:
        result = np.asarray(value)
    except (ValueError, TypeError):
        raise ArgumentError(f"{name} has rows of different lengths, or entries that are not numbers") from None
    if result.dtype == np.bool_ and np.issubdtype(dtype, np.integer):
        raise ArgumentError(f"{name} has dtype bool, not {np.dtype(dtype)}")
    if result.size and not np.can_cast(result.dtype, np.int64 if np.issubdtype(dtype, np.integer) else np.float64,
                                       "same_kind"):
        raise ArgumentError(f"{name} has dtype {result.dtype}, not {np.dtype(dtype)}")
    if np.issubdtype(dtype, np.integer) and result.size and result.dtype != dtype:
        limits = np.iinfo(dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise ArgumentError(f"{name} has values outside of {np.dtype(dtype)}: {result.min()} to {result.max()}")
    return np.ascontiguousarray(result, dtype)


def table_array(value: Any, name: str, num_seqs: int) -> Any:
    """host_array of block tables [num_seqs, blocks]. Lists of different lengths are filled up with -1, which is no
    block."""
    if isinstance(value, (list, tuple)) and all(hasattr(row, "__len__") for row in value):
        width = max(map(len, value), default=0)
        if any(len(row) != width for row in value):
            value = [[*row, *[-1] * (width - len(row))] for row in value]
    tables = host_array(value, np.int32, name)
    if tables is not None and (tables.ndim != 2 or tables.shape[0] != num_seqs):
        raise ArgumentError(f"{name} has shape {tables.shape}; it must be [{num_seqs}, blocks]")
    return tables


def starts_check(starts: np.ndarray, name: str, end: Optional[int] = None, what: str = "") -> np.ndarray:
    """starts [n + 1], where each of n sequences begins and the last one ends; end: how many of what there are."""
    if starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or (np.diff(starts) < 0).any() or (
            end is not None and starts[-1] > end):
        limit = "" if end is None else f", and end at most at {end}, the number of {what}"
        raise ArgumentError(f"{name} must start at 0, never decrease{limit}")
    return starts


def address(value: Optional[np.ndarray]) -> Optional[int]:
    return None if value is None else value.__array_interface__["data"][0]
