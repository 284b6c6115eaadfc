"""What a layer of a model asks for, as the library's objects: contexts, attentions, sinks."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .. import _oneshot
from ..attention import Attention, Geometry
from ..context import torch_context
from ..errors import UnsupportedError

torch_context(torch.device("cpu"))  # now: a thread that transformers starts does not have torch's number of threads


def attention_of(device: torch.device, num_heads: int, num_kv_heads: int, head_size: int, v_head_size: int,
                 dtype: torch.dtype, kv_dtype: Any, scale: Optional[float], window: Optional[int],
                 kwargs: dict[str, Any]) -> Attention:
    """The Attention of a layer; window counts the token itself, as models do."""
    return _oneshot.attention(torch_context(device), Geometry(
        num_heads, num_kv_heads, head_size, v_head_size, dtype, kv_dtype, scale, (window - 1, 0) if window else None,
        float(kwargs.get("softcap") or 0.0)))


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
