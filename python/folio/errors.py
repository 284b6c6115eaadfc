"""What failed calls raise. The text is the library's own sentence: which index, which value, which limit."""

from __future__ import annotations


class Error(Exception):
    """Any error of the library. Nothing was changed, unless a subclass says otherwise."""


class ArgumentError(Error, ValueError):
    """An argument is invalid."""


class UnsupportedError(Error, NotImplementedError):
    """The request is valid, but this backend does not support it."""


class OutOfMemoryError(Error, MemoryError):
    """There is no memory left."""


class DeviceError(Error, RuntimeError):
    """The GPU reported an error; results of the call are undefined."""


class FullError(Error):
    """Too few blocks are available now. Preempt a sequence, or try again when one has ended."""


class StoreError(Error, OSError):
    """A file of the disk tier could not be read or written."""


class InternalError(Error, RuntimeError):
    """A bug in Folio, or memory was overwritten."""


class TooLargeError(Error, ValueError):
    """The request would not fit even into an empty pool or tier."""
