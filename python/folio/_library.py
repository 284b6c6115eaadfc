"""Loads libfolio.so and declares its functions. Turns a status into an exception."""

from __future__ import annotations

import ctypes
import operator
import os
import struct
import weakref
from pathlib import Path
from typing import Any, Optional, TypeVar

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
    try:
        library = ctypes.CDLL(path)  # releases the GIL around every call
    except OSError as error:
        raise ImportError(f"the library of folio cannot be loaded: {error}. Install the package again, or set "
                          "FOLIO_LIBRARY to the path of libfolio.so") from None
    if not hasattr(library, "folio_version"):
        raise ImportError(f"{path} is not libfolio: it has no folio_version")
    missing = [name for name in abi.FUNCTIONS if not hasattr(library, name)]
    for name in abi.FUNCTIONS.keys() - missing:
        function = getattr(library, name)
        function.restype, function.argtypes = abi.FUNCTIONS[name]
    version = library.folio_version().decode()
    if version != abi.VERSION or missing:
        raise ImportError(f"{path} is version {version}{' without ' + missing[0] if missing else ''}, but this package "
                          f"was made for version {abi.VERSION}")
    return library


lib = _load()


def check(status: int) -> None:
    """Raises unless status is FOLIO_OK."""
    if status:
        raise _ERRORS.get(status, errors.Error)(lib.folio_last_error().decode())


_PYTHON_NAMES = {"k_head_size": "head_size"}  # fields whose arguments have other names


def make(kind: Any, **fields: Any) -> Any:
    """A struct with its struct_size set. Fields that are None stay 0, the default."""
    result = kind(struct_size=ctypes.sizeof(kind))
    for name, value in fields.items():
        if value is not None:
            try:
                setattr(result, name, value)
            except TypeError:
                wanted = "a number" if dict(kind._fields_)[name] in (ctypes.c_float, ctypes.c_double) else "an integer"
                raise errors.ArgumentError(f"{_PYTHON_NAMES.get(name, name)} is {value!r}; it must be "
                                           f"{wanted}") from None
            if isinstance(value, int) and (getattr(result, name) or 0) != value:  # ctypes cuts numbers off silently
                raise errors.ArgumentError(f"{_PYTHON_NAMES.get(name, name)} = {value} is outside of its C type")
    return result


_CODES = {ctypes.c_int32: "i", ctypes.c_uint32: "I", ctypes.c_int64: "q", ctypes.c_uint64: "Q", ctypes.c_float: "f",
          ctypes.c_double: "d", ctypes.c_void_p: "Q", ctypes.c_size_t: "Q"}


def packer(kind: Any, first: Optional[str] = None, end: Optional[str] = None) -> struct.Struct:
    """A struct.Struct of the fields of a ctypes struct in [first, end), nested ones and arrays spread out.

    Packed bytes are ten times faster to make than a ctypes struct, and calls take them as a pointer. A struct that
    ends early is one of an older header: the library takes what is missing as 0."""
    start = getattr(kind, first).offset if first else 0
    stop = getattr(kind, end).offset if end else ctypes.sizeof(kind)
    codes = "="
    for place, code in _numbers(kind, 0):
        if start <= place < stop:
            codes += "x" * (place - start - struct.calcsize(codes)) + code
    return struct.Struct(codes + "x" * (stop - start - struct.calcsize(codes)))


def _numbers(kind: Any, place: int) -> list:
    """(offset, code) of each number in a struct, an array or a number at an offset."""
    if kind in _CODES:
        return [(place, _CODES[kind])]
    if hasattr(kind, "_length_"):
        parts = [(kind._type_, i * ctypes.sizeof(kind._type_)) for i in range(kind._length_)]
    else:
        parts = [(field, getattr(kind, name).offset) for name, field in kind._fields_]
    return [number for part, offset in parts for number in _numbers(part, place + offset)]


def fill(call: Any, handle: Any, kind: type) -> Any:
    """The struct that folio_<noun>_get_<what>(handle, &struct) fills."""
    result = make(kind)
    check(call(handle._as_parameter_, ctypes.byref(result)))
    return result


def text(value: Optional[bytes]) -> str:
    return value.decode() if value else ""


_Self = TypeVar("_Self", bound="Handle")  # typing.Self needs Python 3.11


class Handle:
    """An object of the library. It ends with this Python object, or at close().

    At the end of the process it is left to the system, because threads may still be inside of calls. `at_exit` ends it
    there all the same."""

    _keep: Any = None  # Python objects whose memory the library reads

    def __init__(self, handle: int, destroy: Any, keep: Any = None, at_exit: bool = False) -> None:
        self._handle = handle  # its address; 0: closed
        self._keep = keep
        self._pins: set = set()  # what uses its memory, such as arrays of other libraries
        self._end = weakref.finalize(self, destroy, handle)  # must not refer to self
        self._end.atexit = at_exit

    # Calls pass it by name: an exception that it raises inside of ctypes becomes another one.
    @property
    def _as_parameter_(self) -> int:
        return self._handle or self._closed()

    def _closed(self) -> int:
        raise errors.ArgumentError(f"this {type(self).__name__} is closed")

    def close(self) -> None:
        """Ends the object now. No thread may be inside of a call with it, and it must not be used afterwards.

        Memory that arrays of other libraries show is freed with the last of them."""
        self._handle = 0
        if not self._pins:
            self._end()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not copied nor pickled: two objects would end the same memory, and other processes do not have it."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it stands for memory of this process")

    def _unpin(self, user: int) -> None:
        self._pins.discard(user)
        if not self._handle and not self._pins:
            self._end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def handle_of(value: Any, kind: Any, name: str) -> int:
    """The address of an argument that must be an object of this class."""
    if not isinstance(value, kind):
        raise errors.ArgumentError(f"{name} is {type(value).__name__} {value!r}; it must be a folio.{kind.__name__}")
    return value._as_parameter_


def integer(value: Any, name: str, low: int = -2**31, high: int = 2**31 - 1) -> int:
    """An argument that must be an integer. ctypes would cut larger ones off silently."""
    try:
        number = operator.index(value)
    except TypeError:
        raise errors.ArgumentError(f"{name} is {value!r}; it must be an integer") from None
    if not low <= number <= high:
        raise errors.ArgumentError(f"{name} = {number} is outside [{low}, {high}]")
    return number


def choice(what: str, table: dict, name: str) -> Any:
    """The value of an argument that must be one of some names."""
    if name not in table:
        raise errors.ArgumentError(f"{what} {name!r} is not one of {', '.join(table)}")
    return table[name]


def pair(value: Any, name: str) -> tuple[int, int]:
    """(left, right) of a window."""
    try:
        left, right = value
    except (TypeError, ValueError):
        raise errors.ArgumentError(f"{name} is {value!r}; it must be (left, right)") from None
    return integer(left, f"{name}[0]"), integer(right, f"{name}[1]")


def create(call: Any, *arguments: Any) -> int:
    """The address that call(*arguments, &address) hands out."""
    handle = ctypes.c_void_p()
    given = [a._as_parameter_ if isinstance(a, Handle) else a for a in arguments]
    check(call(*given, ctypes.byref(handle)))
    return handle.value or 0
