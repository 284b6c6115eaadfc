"""BLOOM, Falcon and MPT. Their attention is written out in the model and does not use the attention interface, so
patch(model) replaces the forward of each attention module. The model then runs on the library; restore undoes it."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomPreTrainedModel
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.mpt.modeling_mpt import MptAttention, MptPreTrainedModel

from ..attention import alibi_slopes
from ..errors import ArgumentError, UnsupportedError
from .plain import plain_attention

# MPT's model takes no mask of None.
AttentionMaskInterface.register("folio_mask", lambda *given, **options: sdpa_mask(
    *given, **{**options, "allow_is_causal_skip": False}))


@cache
def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(alibi_slopes(num_heads)).to(device)


def _attend(module: Any, past: Any, mask: Any, scaling: float, dropout: float, alibi: bool, query: Any, key: Any,
            value: Any) -> torch.Tensor:
    """Attention of [batch, heads, tokens, size] -> [batch, tokens, heads * size]."""
    if past is not None:
        key, value = past.update(key, value, module.layer_idx)
    slopes = _slopes(query.shape[1], query.device) if alibi else None
    return plain_attention(module, query, key, value, mask, scaling=scaling, dropout=dropout, is_causal=True,
                           slopes=slopes)[0].flatten(2)


def _bloom(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: Any,
           layer_past: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of BloomAttention.forward. alibi is not read: the slopes say the same."""
    dropout = self.attention_dropout.p + self.hidden_dropout
    out = _attend(self, layer_past, attention_mask, self.inv_norm_factor, dropout, True,
                  *self._reshape(self.query_key_value(hidden_states)))
    return self.dense(out) + residual, None


def _falcon(self: Any, hidden_states: torch.Tensor, alibi: Any, attention_mask: Any, position_ids: Any = None,
            layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False,
            position_embeddings: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of FalconAttention.forward. ALiBi is in the mask, rounded to bf16 as the model was trained. K and V are
    kept once for each kv head; the model itself repeats them for all heads of query."""
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    repeats = key.shape[1] // self.num_kv_heads
    key, value = key[:, ::repeats], value[:, ::repeats]
    if alibi is None:
        query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    return self.dense(_attend(self, layer_past, attention_mask, self.inv_norm_factor, self.attention_dropout.p, False,
                              query, key, value)), None


def _mpt(self: Any, hidden_states: torch.Tensor, position_bias: Any, past_key_values: Any = None,
         attention_mask: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of MptAttention.forward. position_bias is not read: the slopes say the same."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    parts = (x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    return self.out_proj(_attend(self, past_key_values, attention_mask, self.softmax_scale, self.attn_dropout_p, True,
                                 *parts)), None


_FAMILIES = ((BloomPreTrainedModel, BloomAttention, _bloom, "folio"),
             (falcon.FalconPreTrainedModel, falcon.FalconAttention, _falcon, "folio"),
             (MptPreTrainedModel, MptAttention, _mpt, "folio_mask"))  # the last: who makes the mask


def _family(model: Any) -> tuple:
    for family in _FAMILIES:
        if isinstance(model, family[0]):
            return [m for m in model.modules() if isinstance(m, family[1])], *family[2:]
    raise ArgumentError(f"{type(model).__name__} is not a BLOOM, Falcon or MPT model; for models with transformers' "
                        "attention interface call model.set_attn_implementation(folio.transformers.PLAIN)")


def patch(model: Any) -> Any:
    """Makes a BLOOM, Falcon or MPT model use the library, and returns it."""
    modules, forward, mask = _family(model)
    config = model.config
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:
        raise UnsupportedError("slow_but_exact with pretraining_tp above 1 is not supported")
    for module in modules:
        module.forward = types.MethodType(forward, module)
    if not hasattr(model, "_folio_before"):
        model._folio_before = config._attn_implementation
    config._attn_implementation_internal = mask  # for masks only: [.., queries, keys] of bools
    return model


def restore(model: Any) -> Any:
    """Undoes patch."""
    for module in _family(model)[0]:
        module.__dict__.pop("forward", None)
    if hasattr(model, "_folio_before"):
        model.config._attn_implementation_internal = model.__dict__.pop("_folio_before")
    return model
