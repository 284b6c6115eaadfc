"""Context: a backend on a device, with its threads."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from . import _abi as abi
from ._library import Handle, check, create, fill, handle_of, integer, lib, make, text
from .errors import ArgumentError, UnsupportedError


class KernelInfo(NamedTuple):
    """An attention kernel, and a case that plans choose it for."""

    name: str
    dtype: str
    kv_dtype: str
    head_size: int
    layout: str
    min_rows: int
    max_rows: int


def _openmp_runtime() -> ctypes.CDLL:
    """A library through which the functions of OpenMP are found: torch's, if that is loaded, else the runtime itself.

    A process may have several runtimes, each with threads of its own. Functions that are looked up in torch's library
    are those that torch calls.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    paths = dict.fromkeys(fields[5].strip() for fields in lines if len(fields) > 5)
    of_torch = [path for path in paths if path.endswith("/libtorch_cpu.so")]
    for path in of_torch + [path for path in paths if re.search(r"/lib(gomp|iomp5|omp)\b", path)]:
        runtime = ctypes.CDLL(path)
        if hasattr(runtime, "GOMP_parallel"):
            return runtime
    raise UnsupportedError('threads="openmp": this process has loaded no OpenMP runtime. Import torch first, '
                           "or give a number of threads")


def _openmp_executor(num_threads: Optional[int]) -> tuple:
    """A folio_executor on the process's OpenMP threads, and what must outlive it."""
    runtime = _openmp_runtime()
    native = ctypes.CDLL(str(Path(__file__).with_name("libfolio_openmp.so")))

    def pointer(function: Any) -> Optional[int]:
        return ctypes.cast(function, ctypes.c_void_p).value

    functions = (ctypes.c_void_p * 3)(pointer(runtime.GOMP_parallel), pointer(runtime.omp_get_thread_num),
                                      pointer(runtime.omp_get_num_threads))
    count = num_threads or min(runtime.omp_get_max_threads(), 256)
    executor = abi.folio_executor(parallel_for=pointer(native.folio_openmp_parallel_for),
                                  user=ctypes.addressof(functions), num_threads=count)
    return executor, (runtime, native, functions)


def _cuda_library() -> Optional[str]:
    """The path of libfolio_cuda.so in the package folio-attention-cuda, if that is installed."""
    try:
        import folio_cuda
    except ImportError:
        return None
    return folio_cuda.LIBRARY


class Context(Handle):
    """A backend on a device, with its threads. Any number of threads may use one at once.

    backend   "auto" (the best for host memory), "cpu", "reference" or "cuda"
    device    number of the GPU, for "cuda"
    threads   a number; None: one per processor; "openmp": the threads of the OpenMP runtime that the process
              has, such as torch's, so that no second pool competes with it
    level     highest instruction-set level to use, such as "avx512"; None: no limit
    """

    def __init__(self, backend: str = "auto", *, device: int = 0, threads: Union[int, str, None] = None,
                 level: Optional[str] = None, pin_threads: bool = False, cuda_library: Optional[str] = None) -> None:
        if not isinstance(backend, str):
            raise ArgumentError(f"backend is {backend!r}; it must be one of auto, {', '.join(backends())}")
        desc = make(abi.folio_context_desc, backend=backend.encode(), device=device, pin_threads=int(pin_threads),
                    level=level.encode() if level else None)
        keep, path = None, None
        if threads == "openmp":
            desc.executor, keep = _openmp_executor(None)
        elif isinstance(threads, str):
            raise ArgumentError(f'threads is {threads!r}; it must be a number, None or "openmp"')
        else:
            desc.num_threads = integer(threads or 0, "threads")
        if backend == "cuda":
            path = cuda_library or _cuda_library()
            desc.cuda_library = path.encode() if path else None
        try:
            handle = create(lib.folio_context_create, ctypes.byref(desc))
        except UnsupportedError as error:
            if backend != "cuda" or path:
                raise
            raise UnsupportedError(f"{error}. For Python it is in the package folio-attention-cuda") from None
        super().__init__(handle, lib.folio_context_destroy, keep)
        info = fill(lib.folio_context_get_info, self, abi.folio_context_info)
        self.backend = text(info.backend)
        self.level = text(info.level)
        self.device_name = text(info.device)
        self.num_threads = int(info.num_threads)
        self.num_kernels = int(info.num_kernels)
        self.place = ("cuda", device) if self.backend == "cuda" else ("cpu", 0)
        self.on_host = self.backend != "cuda"

    def kernels(self) -> list[KernelInfo]:
        """The attention kernels of this context."""
        from ._arrays import DTYPE_NAMES

        result = []
        for index in range(self.num_kernels):
            info = make(abi.folio_context_kernel)
            check(lib.folio_context_get_kernel(self._as_parameter_, index, ctypes.byref(info)))
            result.append(KernelInfo(text(info.name), DTYPE_NAMES[info.dtype], DTYPE_NAMES[info.kv_dtype],
                                     info.head_size, text(lib.folio_layout_name(info.layout)), info.min_rows,
                                     info.max_rows))
        return result

    def stream(self, like: Any = None) -> Optional[int]:
        """The CUDA stream of a call: that which torch, or CuPy for arrays of CuPy, has as its current one."""
        if self.place[0] == "cpu":
            return None
        if like is not None and type(like).__module__.partition(".")[0] == "cupy":
            return sys.modules["cupy"].cuda.get_current_stream().ptr
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the same, without making a Stream
            return raw(self.place[1]) if raw else torch.cuda.current_stream(self.place[1]).cuda_stream
        return None

    def wait(self, stream: Optional[int] = None) -> None:
        """Waits until the stream (None: the current one) is idle; raises its first error."""
        run = make(abi.folio_run, stream=stream or self.stream())
        check(lib.folio_run_wait(self._as_parameter_, ctypes.byref(run)))

    def __repr__(self) -> str:
        return f"<folio.Context {self.backend} {self.level} on {self.device_name}, {self.num_threads} threads>"


_defaults: dict = {}  # of a place and of its threads
_defaults_lock = threading.Lock()


def default_context(place: tuple = ("cpu", 0), threads: Optional[str] = None) -> Context:
    """The context that functions use if none is given: one for the CPU and one for each GPU, made when first used.
    On the CPU it runs on torch's threads if torch is imported when it is made. threads="openmp": one that always
    does."""
    found = _defaults.get((place, threads))
    if found is None:
        with _defaults_lock:
            cuda = place[0] == "cuda"
            own = None if cuda or not (threads or "torch" in sys.modules) else "openmp"
            found = _defaults.get((place, threads)) or _defaults.get((place, own))
            if found is None:
                found = _defaults[place, own] = Context("cuda", device=place[1]) if cuda else Context(threads=own)
            _defaults[place, threads] = found
    return found


def torch_context(device: Any) -> Context:
    """The context of a torch device. On the CPU it runs on torch's threads, so that no second pool competes with
    them."""
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"tensors are on {device}; folio runs on CPUs and NVIDIA GPUs")
    return default_context((device.type, device.index or 0), "openmp")


def given_or_default(context: Optional[Context], place: tuple = ("cpu", 0)) -> Context:
    """The argument `context` of a call."""
    if context is None:
        return default_context(place)
    handle_of(context, Context, "context")
    return context


def backends() -> list[str]:
    """Names of the backends, best first, also of those that are not available here."""
    return [text(lib.folio_backend_name(i)) for i in range(lib.folio_backend_count())]


class BackendInfo(NamedTuple):
    """What a backend is and can do here."""

    name: str
    available: bool
    reason: str  # why it is not available
    device: str
    levels: list  # instruction-set levels built in, lowest first
    level: str  # the one that a context gets by default
    features: dict  # name: "" if supported, else why not
    max_head_size: int


def backend_info(name: str) -> BackendInfo:
    """All about one backend, by name. "cuda" loads its library."""
    path = _cuda_library() if name == "cuda" else None
    if path:  # what is loaded first stays
        try:
            Context("cuda", cuda_library=path).close()
        except UnsupportedError:
            pass
    info = make(abi.folio_backend_info)
    check(lib.folio_backend_get_info(name.encode(), ctypes.byref(info)))
    levels = ctypes.cast(info.levels, ctypes.POINTER(ctypes.c_char_p))
    features = ctypes.cast(info.features, ctypes.POINTER(abi.folio_feature))
    return BackendInfo(text(info.name), bool(info.available), text(info.reason), text(info.device),
                       [text(levels[i]) for i in range(info.num_levels)], text(info.level),
                       {text(f.name): "" if f.supported else text(f.reason) for f in features[:info.num_features]},
                       info.max_head_size)
