"""Folio in Hugging Face transformers. Importing this module registers its attention functions.

    import folio.transformers
    model.set_attn_implementation(folio.transformers.PLAIN)      # forward, generate
    model.set_attn_implementation(folio.transformers.BATCHING)   # generate_batch

    plain.py      the attention interface: any cache of transformers, masks, encoders, cross attention
    paged.py      continuous batching: K and V in the library's own format inside the pages of transformers
    paged_517.py  how transformers 5.17 arranges its pages
    paged_519.py  how transformers 5.19 to 5.23 arranges them
    bloom.py      BLOOM, which does not use the attention interface: patch_bloom(model)

PLAIN is "folio". BATCHING is "paged|folio" in transformers 5.17 and "folio_flash" from 5.19 on, where the name of an
implementation for continuous batching has to contain "flash". No flash_attn is imported for it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Optional

import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..errors import UnsupportedError
from .bloom import patch_bloom, restore_bloom
from .plain import plain_attention

__all__ = ["BATCHING", "PLAIN", "patch_bloom", "restore_bloom", "seam"]

PLAIN = "folio"


def seam() -> Optional[str]:
    """Which continuous batching the installed transformers has: "5.17", "5.19" or None (another one)."""
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache
    except ImportError:
        return None
    arguments = list(inspect.signature(PagedAttentionCache.update).parameters)[1:]
    if arguments == ["key_states", "value_states", "layer_idx", "read_index", "write_index"]:
        return "5.17"
    if arguments == ["key_states", "value_states", "layer_idx", "kwargs"]:
        return "5.19" if hasattr(PagedAttentionCache, "perform_cache_copy") else None
    return None


def _register() -> Optional[str]:
    AttentionInterface.register(PLAIN, plain_attention)
    AttentionMaskInterface.register(PLAIN, sdpa_mask)
    found = seam()
    if found is None:
        return None
    adapter = import_module(".paged_517" if found == "5.17" else ".paged_519", __name__)
    AttentionInterface.register(adapter.NAME, adapter.attention)
    adapter.prepare()
    return adapter.NAME


_batching = _register()


def __getattr__(name: str) -> Any:
    if name == "BATCHING":
        if _batching is None:
            raise UnsupportedError(f"continuous batching of transformers {transformers.__version__} is not supported: "
                                   "its paged cache is neither that of 5.17 nor that of 5.19 to 5.23")
        return _batching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
