"""The classes that vLLM asks: what Folio supports, which builder and which layer it has."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..errors import UnsupportedError
from .builder import FolioBuilder, FolioMetadata
from .impl import FolioImpl, lacks
from .plugin import log


class Builder(FolioBuilder, AttentionMetadataBuilder[FolioMetadata]):
    """vLLM's base class has the switches that Folio leaves as they are."""


class Impl(FolioImpl, AttentionImpl[FolioMetadata]):
    """The same of a layer."""

    dcp_group = staticmethod(get_dcp_group)


def _always(answer: Any) -> Any:
    """A method that gives the same answer whatever it is asked."""
    return classmethod(lambda *_, **__: answer)


class _Backend(AttentionBackend):
    forward_includes_kv_cache_update = True  # one call writes k and v and attends
    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]

    get_supported_kernel_block_sizes = _always([MultipleOf(16)])
    supported_kv_cache_layouts = _always((KVCacheLayout.LBHNC,))  # the bytes of one block lie together
    get_impl_cls, get_builder_cls = _always(Impl), _always(Builder)
    get_supported_head_sizes = _always([])  # asked by supports_head_size
    supports_sink = supports_sliding_window = supports_non_causal = supports_batch_invariance = _always(True)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return lacks(head_size, "auto") is None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ("decoder", "encoder", "encoder_only", "encoder_decoder")


class CPUBackend(_Backend, CPUAttentionBackend):
    """Takes the place of CPU_ATTN. A subclass of it, because models ask for that."""

    get_supported_kernel_block_sizes = _always([MultipleOf(32)])  # as CPU_ATTN, so that block sizes do not change
    get_name = _always("CPU_ATTN")  # vLLM looks the name up among its own


class CUDABackend(_Backend):
    """The backend CUSTOM on NVIDIA GPUs."""

    get_name = _always("CUSTOM")


def path(cls: type) -> str:
    """The name by which vLLM imports a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def leave_others(platform: type) -> None:
    """Makes vLLM's platform for CPUs, which asks no backend what it supports, leave layers that Folio lacks to vLLM's
    own backend. What that one lacks too is an error: with such a KV type it would run and give random text."""
    choose = getattr(platform, "get_attn_backend_cls").__func__

    def choose_supported(cls: type, selected: Any, attn_selector_config: Any, *rest: Any, **others: Any) -> str:
        chosen = choose(cls, selected, attn_selector_config, *rest, **others)
        head_size, kv_cache_dtype = attn_selector_config.head_size, attn_selector_config.kv_cache_dtype or "auto"
        reason = lacks(head_size, kv_cache_dtype) if chosen == path(CPUBackend) else None
        if reason is None:
            return chosen
        own = CPUAttentionBackend
        if not own.supports_head_size(head_size) or not own.supports_kv_cache_dtype(kv_cache_dtype):
            raise UnsupportedError(f"Folio: {reason}. vLLM's own attention on CPUs lacks it too: it has the KV types "
                                   f"{', '.join(own.supported_kv_cache_dtypes)} and the head sizes "
                                   f"{', '.join(map(str, own.get_supported_head_sizes()))}")
        log.warning("Folio leaves these layers to vLLM's own attention: %s", reason)
        return path(own)

    setattr(platform, "get_attn_backend_cls", classmethod(choose_supported))
