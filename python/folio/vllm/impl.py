"""One layer: writes k and v to vLLM's KV tensor and attends over it, through the plan of the layer's group.

vLLM's KV tensor is [blocks, kv_heads, block_size, 2 * head_size] for each layer. The bytes of a block are the
backend's own business: Folio keeps its native layout in them, [kv_heads][K | V], packed for its kernels.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._arrays import dtype_of
from ..attention import Geometry, type_of
from ..cache import KVCache
from ..context import backend_info, torch_context
from ..errors import UnsupportedError
from ..plan import attention_forward, options, run_layer
from . import parallel
from .builder import FolioMetadata

# An encoder's layer has no cache, and sees the rows of its own step: to the library it is encoder-only attention.
_TYPES = {"decoder": "decoder", "encoder": "encoder_only", "encoder_only": "encoder_only",
          "encoder_decoder": "encoder_decoder"}
_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_KV_DTYPES = ("auto", "float32", "bfloat16", "float16", *_FP8)


def lacks(head_size: int, kv_cache_dtype: str) -> Optional[str]:
    """Why Folio cannot serve a layer, as a sentence that says what works; None: it can."""
    if kv_cache_dtype not in _KV_DTYPES:
        return f"kv_cache_dtype {kv_cache_dtype!r} is not one of {', '.join(_KV_DTYPES)}"
    most = backend_info("cpu").max_head_size  # the same on GPUs
    if head_size < 8 or head_size % 8 or head_size > most:
        return f"head_size {head_size} is not a multiple of 8 in [8, {most}]"
    return None


class FolioImpl:
    """An attention layer of vLLM. The names of the arguments are vLLM's."""

    can_return_lse_for_decode = supports_dcp = True
    dcp_world_size, dcp_rank = 1, 0  # of decode context parallelism; vLLM sets them before __init__

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: Optional[int] = None,
                 alibi_slopes: Any = None, sliding_window: Optional[int] = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: Optional[float] = None, attn_type: str = "decoder",
                 kv_sharing_target_layer_name: Optional[str] = None, sinks: Any = None) -> None:
        reason = lacks(head_size, kv_cache_dtype)
        if reason:
            raise UnsupportedError(f"Folio: {reason}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.type = _TYPES[getattr(attn_type, "value", attn_type)]
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self._type_number = type_of(self.type)
        if self.dcp_world_size > 1 and (sliding_window is not None or alibi_slopes is not None or sinks is not None
                                        or kv_cache_dtype in _FP8 or self.type != "decoder"):
            raise UnsupportedError("Folio: decode context parallelism is for decoders without sliding window, ALiBi "
                                   "and sinks, whose KV type is not fp8: leave --decode-context-parallel-size at 1")
        self._floats: dict = {}  # slopes and sinks, if they were not f32 tensors
        self._packed: tuple = (None, b"")  # what the options were packed from, and they
        self._cache: Any = None
        self._cache_place: Any = None

    def geometry(self, dtype: Any) -> Geometry:
        """Layers with equal ones share an attention."""
        side = max(self.sliding_window - 1, -1)  # causal rows see nothing to the right, whatever the window
        return Geometry(self.num_heads, self.num_kv_heads, self.head_size, self.head_size, dtype_of(dtype),
                        self._kv_dtype(dtype), self.scale, (side, side), self.logits_soft_cap)

    def _kv_dtype(self, dtype: Any) -> int:
        if self.type == "encoder_only" or self.kv_cache_dtype == "auto":
            return dtype_of(dtype)
        return dtype_of(_FP8.get(self.kv_cache_dtype, self.kv_cache_dtype))

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any,
                attn_metadata: Optional[FolioMetadata], output: Any, output_scale: Any = None,
                output_block_scale: Any = None) -> Any:
        """query [tokens, heads, head_size], key and value [tokens, kv_heads, head_size] -> output, like query."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("Folio does not quantize the output of attention")
        if attn_metadata is None:  # vLLM warms up
            return output
        builder, cache = attn_metadata.builder, None
        if self.dcp_world_size > 1:
            parallel.forward(self, builder, attn_metadata, query, key, value, kv_cache, output)
            return output
        builder.prepare(attn_metadata, kv_cache)
        if self.type != "encoder_only":
            cache = self._wrap(kv_cache, query.dtype)
            if self.kv_sharing_target_layer_name is not None:
                key = value = None  # the layer that it shares with has written
            elif self.type == "encoder_decoder":
                if key is not None:
                    self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
                key = value = None
        rows, number = builder.rows, builder.numbers[layer.layer_name]
        at = builder.attentions[number]
        run_layer(attention_forward, (builder.plan._as_parameter_, number, self._type_number), builder.context, at,
                  _first(query, rows), None if key is None else _first(key, rows),
                  None if value is None else _first(value, rows), cache, 0,
                  output if output.shape[0] == rows else output[:rows], None, self._options(layer, at, query))
        return output

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        """Writes rows of key and value to slots. forward() does this itself for self-attention."""
        if self.type == "encoder_only" or not slot_mapping.numel():
            return
        rows, (k_scale, v_scale) = slot_mapping.shape[0], self._scales(layer)
        self._wrap(kv_cache, key.dtype).write(0, _first(key, rows), _first(value, rows), slot_mapping.cpu(),
                                              k_scale=k_scale, v_scale=v_scale)

    def _wrap(self, kv_cache: Any, dtype: Any) -> KVCache:
        """The folio.KVCache in vLLM's tensor."""
        place = (kv_cache.data_ptr(), kv_cache.shape)
        if self._cache_place != place:
            blocks, heads, block_size, _ = kv_cache.shape
            self._cache = KVCache.wrap([kv_cache], context=torch_context(kv_cache.device), layout="native",
                                       block_size=block_size, num_kv_heads=heads, head_size=self.head_size,
                                       dtype=self._kv_dtype(dtype), num_blocks=blocks)
            self._cache_place = place
        return self._cache

    def _scales(self, layer: Any) -> tuple:
        return (layer._k_scale_float, layer._v_scale_float) if self.kv_cache_dtype in _FP8 else (0.0, 0.0)

    def _options(self, layer: Any, at: Any, like: Any) -> bytes:
        """Slopes, sinks and scales as the library reads them."""
        scales = self._scales(layer)
        if self.alibi_slopes is None and self.sinks is None and scales == (0.0, 0.0):
            return b""
        slopes = self._float_array("slopes", self.alibi_slopes, like)
        sinks = self._float_array("sinks", self.sinks, like)
        key = (scales, slopes is not None and slopes.data_ptr(), sinks is not None and sinks.data_ptr())
        if key != self._packed[0]:
            self._packed = (key, options(at.context, at, slopes, sinks, None, *scales)[0])
        return self._packed[1]

    def _float_array(self, name: str, values: Any, like: Any) -> Any:
        """Slopes or sinks as f32, where q lies."""
        if isinstance(values, list):
            if name not in self._floats:
                self._floats[name] = torch.tensor(values, dtype=torch.float32, device=like.device)
            values = self._floats[name]
        elif values is not None and values.dtype != torch.float32:
            values = self._floats[name] = values.to(torch.float32)  # each time: weights may be loaded anew
        return values


def _first(value: Any, rows: int) -> Any:
    """The first rows of value [tokens, heads, size]; the numbers of a head are contiguous."""
    if value.shape[0] != rows:
        value = value[:rows]
    return value if value.stride(2) == 1 else value.contiguous()
