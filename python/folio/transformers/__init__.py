"""Folio in Hugging Face transformers. Importing this module registers its attention functions.

    import folio.transformers
    model.set_attn_implementation(folio.transformers.PLAIN)      # forward, generate
    model.set_attn_implementation(folio.transformers.BATCHING)   # generate_batch

    plain.py      the attention interface: any cache of transformers, masks, encoders, cross attention
    paged.py      continuous batching: K and V in the library's own format inside the pages of transformers
    paged_517.py  how transformers 5.17 arranges its pages
    paged_519.py  how transformers 5.18 to 5.23 arrange them
    patches.py    BLOOM, Falcon and MPT, which do not use the attention interface: patch(model)

PLAIN is "folio". BATCHING is "paged|folio" up to transformers 5.18 and "folio_flash" from 5.19 on, where the name of
an implementation for continuous batching has to contain "flash". No flash_attn is imported for it.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Optional

import transformers
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..errors import UnsupportedError
from .patches import patch, restore
from .plain import plain_attention

__all__ = ["BATCHING", "PLAIN", "interface", "patch", "restore"]

PLAIN = "folio"
_PREFIXED = "paged|folio"
_WITHOUT_STEP = ("nemotron", "stablelm")  # model types; their layers drop the arguments that BATCHING needs
_FLASH = "folio_flash"  # no digit: with 2 or 3, transformers would ask flash_attn for its block tables


def interface() -> Optional[str]:
    """The oldest version with the same continuous batching as the installed one: "5.17", "5.18", "5.19"; None: unknown.

    "5.17": K and V tensors, names with "paged|". "5.18": one tensor of pages. "5.19": names without "paged|".
    """
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache
    except ImportError:
        return None
    arguments = list(inspect.signature(PagedAttentionCache.update).parameters)[1:]
    prefixed = "paged|sdpa" in AttentionInterface().valid_keys()
    paged = find_spec("transformers.generation.continuous_batching.cache_allocators") is not None
    if prefixed and arguments == ["key_states", "value_states", "layer_idx", "read_index", "write_index"]:
        return "5.18" if paged else "5.17"
    if not prefixed and paged and arguments == ["key_states", "value_states", "layer_idx", "kwargs"]:
        return "5.19"
    return None


def _refuse_model(config: Any) -> None:
    """Raises if continuous batching cannot serve a model. Later, in the thread of transformers that runs it, an error
    would only be logged, and generate_batch would return no tokens."""
    text = config.get_text_config()
    if text.model_type in _WITHOUT_STEP:
        raise UnsupportedError(f"the layers of a {text.model_type} model do not pass the step of continuous batching "
                               "on to their attention: use folio.transformers.PLAIN with generate")
    v_size = getattr(text, "v_head_dim", None)
    parts: list[Any] = [getattr(text, f"qk_{part}_head_dim", None) for part in ("nope", "rope")]
    if v_size and None not in parts and sum(parts) != v_size:
        raise UnsupportedError(f"keys have heads of {sum(parts)} and values of {v_size}; the paged cache of "
                               "transformers has room for one size only: use folio.transformers.PLAIN with generate")


def _check_names() -> None:
    """Refuses models when the name for continuous batching is chosen. Lets models take the name of 5.19 as it is:
    transformers would look for flash_attn, or for a name that a model lists."""
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(check, "_folio", False):
        return

    def check_others(self: Any, attn_implementation: Optional[str], *args: Any, **kwargs: Any) -> str:
        if attn_implementation in (_FLASH, _PREFIXED):
            _refuse_model(self.config)
        if attn_implementation == _FLASH:
            return _FLASH
        return check(self, attn_implementation, *args, **kwargs)

    setattr(check_others, "_folio", True)
    PreTrainedModel._check_and_adjust_attn_implementation = check_others


def _register() -> Optional[str]:
    """Registers all functions. Returns the name for continuous batching, None where it is not supported."""
    AttentionInterface.register(PLAIN, plain_attention)
    AttentionMaskInterface.register(PLAIN, sdpa_mask)
    found = interface()
    if found is None:
        return None
    adapter = import_module(".paged_517" if found == "5.17" else ".paged_519", __name__)
    name = _FLASH if found == "5.19" else _PREFIXED
    AttentionInterface.register(name, adapter.attention)
    _check_names()
    return name


_batching = _register()


def __getattr__(name: str) -> Any:
    if name == "BATCHING":
        if _batching is None:
            raise UnsupportedError(f"continuous batching of transformers {transformers.__version__} is not supported: "
                                   "its paged cache is not one of those of 5.17 to 5.23")
        return _batching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
