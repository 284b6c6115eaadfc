"""DeviceArray: GPU memory of a context as an array that other libraries take without a copy."""

from __future__ import annotations

import atexit
import ctypes
import itertools
from functools import partial
from typing import Any, Optional

import numpy as np

from . import _abi as abi
from ._arrays import DLPACK_TYPES, _DLTensor, contiguous, dtype_of, numpy_dtype
from ._library import Handle, check, create, lib, make
from .context import Context


class _DLManaged(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManaged))
_DLManaged._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_numbers = itertools.count()
_exported: dict = {}  # address of a _DLManaged: what it needs, until its consumer deletes it


def _forget(place: Optional[int]) -> None:
    entry = _exported.pop(place, None)
    if entry is not None:
        entry[-1]._unpin(place)


@_DELETER
def _delete(managed: Any) -> None:
    _forget(ctypes.addressof(managed.contents))


@atexit.register
def _leave() -> None:
    """Arrays that are still there may end after all code of Python: they then call a function that does nothing."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_exported))
    for managed, *_ in _exported.values():
        managed.deleter = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, _DELETER)


_CAPSULE_END = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


@_CAPSULE_END
def _capsule_end(capsule: int) -> None:
    if _valid(capsule, b"dltensor"):  # nobody consumed it
        _forget(_raw_pointer(capsule, b"dltensor"))


def _capsule(data: int, dtype: int, shape: tuple, strides: tuple, device: tuple, owner: Handle) -> Any:
    """A DLPack capsule of memory of `owner`, which frees it after the last capsule's consumer is gone."""
    dims, steps = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
    managed = _DLManaged(deleter=_delete)
    code, bits = DLPACK_TYPES[dtype]
    managed.tensor = _DLTensor(data, *device, len(shape), code, bits, 1, dims, steps, 0)
    place = ctypes.addressof(managed)
    owner._pins.add(place)
    _exported[place] = (managed, dims, steps, owner)
    return _new_capsule(place, b"dltensor", ctypes.cast(_capsule_end, ctypes.c_void_p))


class ArrayView:
    """Memory of an object of the library, with DLPack: torch.from_dlpack(view), np.from_dlpack(view)."""

    def __init__(self, data: int, dtype: int, shape: tuple, strides: tuple, context: Context, owner: Handle) -> None:
        self._data, self._dtype, self.shape, self.strides = data, dtype, shape, strides
        self.context, self._owner = context, owner

    def __dlpack_device__(self: Any) -> tuple:
        return (1, 0) if self.context.place[0] == "cpu" else (2, self.context.place[1])

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        self._owner._as_parameter_  # raises if it is closed
        return _capsule(self._data, self._dtype, self.shape, self.strides, self.__dlpack_device__(), self._owner)


class DeviceArray(Handle):
    """Contiguous memory of a context. Supports DLPack, so torch, CuPy and JAX take it without a copy."""

    def __init__(self, context: Context, shape: tuple, dtype: Any) -> None:
        self.context, self.shape, self._dtype = context, tuple(int(n) for n in shape), dtype_of(dtype)
        self.nbytes: int = max(1, int(np.prod(self.shape, dtype=np.int64)) * lib.folio_dtype_size(self._dtype))
        memory = create(lib.folio_memory_create, context, abi.FOLIO_MEMORY_DEVICE, self.nbytes)
        number = next(_numbers)
        context._pins.add(number)  # the context frees it, so it must be there until then
        super().__init__(memory, partial(_free_memory, context, context._as_parameter_, number, self.nbytes), context)

    @classmethod
    def copy_of(cls, context: Context, value: Any, stream: Optional[int] = None) -> "DeviceArray":
        """A copy of an array in host memory, once the stream is done with it."""
        host = np.ascontiguousarray(value)
        result = cls(context, host.shape, host.dtype)
        result._copy(result._as_parameter_, host.__array_interface__["data"][0], stream)
        return result

    def numpy(self, stream: Optional[int] = None) -> np.ndarray:
        """A copy in host memory; waits for the stream."""
        host = np.empty(self.shape, numpy_dtype(self._dtype))
        self._copy(host.__array_interface__["data"][0], self._as_parameter_, stream)
        return host

    def _copy(self, to: Any, source: Any, stream: Optional[int]) -> None:
        run = make(abi.folio_run, stream=stream if stream is not None else self.context.stream())
        check(lib.folio_memory_copy(self.context._as_parameter_, to, source, self.nbytes, ctypes.byref(run)))
        check(lib.folio_run_wait(self.context._as_parameter_, ctypes.byref(run)))

    @property
    def dtype(self) -> np.dtype:
        return numpy_dtype(self._dtype)

    __dlpack_device__ = ArrayView.__dlpack_device__

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if stream not in (None, -1) and self.context.place[0] != "cpu":
            self.context.wait()  # the consumer's stream starts after ours
        return _capsule(self._as_parameter_, self._dtype, self.shape, contiguous(self.shape), self.__dlpack_device__(),
                        self)

    def __repr__(self) -> str:
        return f"<folio.DeviceArray {self.dtype.name} {list(self.shape)} on {self.context.device_name}>"


def _free_memory(context: Context, handle: int, number: int, nbytes: int, memory: int) -> None:
    lib.folio_memory_destroy(handle, abi.FOLIO_MEMORY_DEVICE, memory, nbytes)
    context._unpin(number)
