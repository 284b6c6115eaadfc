"""What a layer of a model asks for, as the library's objects: contexts, attentions, sinks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional

import torch

from ..attention import Attention
from ..context import Context, default_context
from ..errors import UnsupportedError

# Made here, in the thread that imports: a new thread does not have torch's number of threads yet. It runs on torch's
# OpenMP threads, so that no second pool competes with them.
_cpu = Context("cpu", threads="openmp")


def context_of(device: torch.device) -> Context:
    if device.type == "cpu":
        return _cpu
    if device.type != "cuda":
        raise UnsupportedError(f"tensors are on {device}; folio runs on CPUs and NVIDIA GPUs")
    return default_context(("cuda", device.index or 0))


@lru_cache(maxsize=64)
def attention_of(device: torch.device, num_heads: int, num_kv_heads: int, head_size: int, v_head_size: int,
                 dtype: torch.dtype, kv_dtype: torch.dtype, scale: Optional[float], window: Optional[int],
                 soft_cap: Optional[float]) -> Attention:
    """The Attention of a layer; window counts the token itself, as models do."""
    return Attention(context_of(device), num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
                     v_head_size=v_head_size, dtype=dtype, kv_dtype=kv_dtype, scale=scale,
                     window=(window - 1, 0) if window else None, soft_cap=soft_cap)


def check_inference(module: torch.nn.Module, tensors: tuple, dropout: float) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError("folio computes no gradients: call the model under torch.no_grad()")
    if dropout and module.training:
        raise UnsupportedError(f"dropout is {dropout}; folio is for inference: call model.eval()")


def sinks_of(module: torch.nn.Module, given: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """f32 [heads], or None: the learned sinks of a layer, from its call or its module."""
    sinks = given if given is not None else getattr(module, "sinks", None)
    return None if sinks is None else sinks.detach().reshape(-1).to(torch.float32)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, size] as [batch * tokens, heads, size]; a view where strides allow it."""
    batch, heads, tokens, size = x.shape
    x = x.transpose(1, 2)
    if x.stride(3) != 1:
        x = x.contiguous()
    return x.reshape(batch * tokens, heads, size)


def soft_cap_of(kwargs: dict[str, Any]) -> Optional[float]:
    cap = kwargs.get("softcap")
    return float(cap) if cap else None
