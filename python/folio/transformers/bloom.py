"""BLOOM. Its attention (ALiBi) is written out in the model and does not use the attention interface, so
patch_bloom(model) replaces the forward of each attention module. The model then runs on the library; restore_bloom
undoes it."""

from __future__ import annotations

import types
from typing import Any, Optional

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomPreTrainedModel

from ..errors import ArgumentError, UnsupportedError
from .plain import plain_attention


def _slopes(num_heads: int) -> torch.Tensor:
    """ALiBi's slopes: 2^(-8/n), 2^(-16/n), ... for n heads; if n is no power of two, the next power's fill the rest."""
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return torch.tensor(slopes, dtype=torch.float32)


def _forward(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: torch.Tensor,
             attention_mask: Optional[torch.Tensor], layer_past: Any = None, use_cache: bool = False,
             output_attentions: bool = False, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of BloomAttention.forward. alibi is not read: the slopes say the same."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    if self._folio_slopes.device != query.device:
        self._folio_slopes = self._folio_slopes.to(query.device)
    out, _ = plain_attention(self, query, key, value, attention_mask, scaling=self.inv_norm_factor,
                             dropout=self.attention_dropout.p + self.hidden_dropout, is_causal=True,
                             slopes=self._folio_slopes)
    return self.dense(out.flatten(2)) + residual, None


def _modules(model: Any) -> list[Any]:
    if not isinstance(model, BloomPreTrainedModel):
        raise ArgumentError(f"{type(model).__name__} is not a BLOOM model")
    return [m for m in model.modules() if isinstance(m, BloomAttention)]


def patch_bloom(model: Any) -> Any:
    """Makes a BLOOM model use the library, and returns it."""
    modules = _modules(model)
    if model.config.slow_but_exact and model.config.pretraining_tp > 1:
        raise UnsupportedError("slow_but_exact with pretraining_tp above 1 is not supported")
    for module in modules:
        module._folio_slopes = _slopes(module.num_heads)
        module.forward = types.MethodType(_forward, module)
    model.config._attn_implementation_internal = "folio"  # for masks only: [.., queries, keys] of bools
    return model


def restore_bloom(model: Any) -> Any:
    """Undoes patch_bloom."""
    for module in _modules(model):
        module.__dict__.pop("forward", None)
    model.config._attn_implementation_internal = "eager"
    return model
