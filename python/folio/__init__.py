"""Folio: paged attention on CPUs and NVIDIA GPUs.

    batch  ->  plan  ->  for each layer: plan.forward  ->  out

    Context    a backend on a device, with its threads
    Attention  one layer geometry: heads, head sizes, scale, window, soft cap
    KVCache    K and V of all layers in fixed-size blocks
    Batch      one step's sequences: lengths and block tables
    Plan       limits and workspace: made once, updated each step, used by every layer
    Pool, Sequence   who holds which blocks: prefix cache, forks, swapping
    Rotary     rotary embedding with the forward
    Passport   what K and V are, for stores and exported blocks
    attend     one layer in one call

Arrays are NumPy arrays (bf16 by ml_dtypes), torch tensors, or anything with DLPack, and are never copied.
Other modules: folio.flash_attn, folio.flashinfer, folio.torch, folio.transformers, folio.vllm.
"""

try:
    from ._abi import VERSION as __version__
except ModuleNotFoundError:
    raise ImportError(f"{__path__[0]} is the source folder of folio, where nothing is built. Install the package "
                      "(`pip install ./python` in the repository) and start Python in another folder") from None
from .attention import Attention, Rotary
from .batch import Batch
from .cache import KVCache, Shape, cache_shape
from .context import BackendInfo, Context, KernelInfo, backend_info, backends, default_context
from .device import DeviceArray
from .errors import (ArgumentError, DeviceError, Error, FullError, InternalError, OutOfMemoryError, StoreError,
                     TooLargeError, UnsupportedError)
from .functional import attend, merge_states
from .passport import Passport
from .plan import BadWrite, Plan
from .pool import Pool, Sequence

__all__ = [
    "ArgumentError", "Attention", "BackendInfo", "BadWrite", "Batch", "Context", "DeviceArray", "DeviceError",
    "Error", "FullError", "InternalError", "KVCache", "KernelInfo", "OutOfMemoryError", "Passport", "Plan", "Pool",
    "Rotary", "Sequence", "Shape", "StoreError", "TooLargeError", "UnsupportedError", "attend", "backend_info",
    "backends", "cache_shape", "default_context", "merge_states", "__version__",
]
