"""The classes that vLLM asks: what Folio supports, which builder and which layer it has."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..context import backend_info
from .builder import FolioBuilder, FolioMetadata
from .impl import FolioImpl


class Builder(FolioBuilder, AttentionMetadataBuilder[FolioMetadata]):
    """vLLM's base class has the switches that Folio leaves as they are."""


class Impl(FolioImpl, AttentionImpl[FolioMetadata]):
    """The same of a layer."""


class _Backend(AttentionBackend):
    forward_includes_kv_cache_update = True  # one call writes k and v and attends
    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        return (KVCacheLayout.LBHNC,)  # the bytes of one block lie together

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list:
        return []  # asked by supports_head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= backend_info("cpu").max_head_size  # the same on GPUs

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ("decoder", "encoder", "encoder_only", "encoder_decoder")


class CPUBackend(_Backend, CPUAttentionBackend):
    """Takes the place of CPU_ATTN. A subclass of it, because models ask for that."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return [MultipleOf(32)]  # as CPU_ATTN, so that block sizes do not change

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # vLLM looks the name up among its own


class CUDABackend(_Backend):
    """The backend CUSTOM on NVIDIA GPUs."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


def path(cls: type) -> str:
    """The name by which vLLM imports a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
