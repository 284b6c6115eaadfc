"""Loads libfolio.so and declares its functions. Turns a status into an exception."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any, Optional

from . import _abi as abi
from . import errors

_ERRORS = {
    abi.FOLIO_ERR_ARGUMENT: errors.ArgumentError,
    abi.FOLIO_ERR_UNSUPPORTED: errors.UnsupportedError,
    abi.FOLIO_ERR_MEMORY: errors.OutOfMemoryError,
    abi.FOLIO_ERR_DEVICE: errors.DeviceError,
    abi.FOLIO_ERR_FULL: errors.FullError,
    abi.FOLIO_ERR_IO: errors.StoreError,
    abi.FOLIO_ERR_INTERNAL: errors.InternalError,
    abi.FOLIO_ERR_TOO_LARGE: errors.TooLargeError,
}


def _load() -> ctypes.CDLL:
    path = os.environ.get("FOLIO_LIBRARY") or str(Path(__file__).with_name("libfolio.so"))
    library = ctypes.CDLL(path)  # releases the GIL around every call
    for name, (result, parameters) in abi.FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    version = library.folio_version().decode()
    if version != abi.VERSION:
        raise ImportError(f"{path} is version {version}, but this package was made for version {abi.VERSION}")
    return library


lib = _load()


def check(status: int) -> None:
    """Raises unless status is FOLIO_OK."""
    if status:
        raise _ERRORS.get(status, errors.Error)(lib.folio_last_error().decode())


def make(kind: type, **fields: Any) -> Any:
    """A struct with its struct_size set. Fields that are None stay 0, the default."""
    struct = kind(struct_size=ctypes.sizeof(kind))
    for name, value in fields.items():
        if value is not None:
            setattr(struct, name, value)
    return struct


def fill(call: Any, handle: Any, kind: type) -> Any:
    """The struct that folio_<noun>_get_<what>(handle, &struct) fills."""
    struct = make(kind)
    check(call(handle, ctypes.byref(struct)))
    return struct


def text(value: Optional[bytes]) -> str:
    return value.decode() if value else ""


class Handle:
    """An object of the library. It ends with this Python object, or at close()."""

    _keep: Any = None  # Python objects whose memory the library reads

    def __init__(self, handle: ctypes.c_void_p, destroy: Any, keep: Any = None) -> None:
        self._handle = handle
        self._keep = keep
        self._end = weakref.finalize(self, destroy, handle)  # also at exit; must not refer to self

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        if not self._end.alive:
            raise errors.ArgumentError(f"this {type(self).__name__} is closed")
        return self._handle

    def close(self) -> None:
        """Ends the object now. It must not be used afterwards."""
        self._end()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def create(call: Any, *arguments: Any) -> ctypes.c_void_p:
    """The handle that call(*arguments, &handle) hands out."""
    handle = ctypes.c_void_p()
    check(call(*arguments, ctypes.byref(handle)))
    return handle
