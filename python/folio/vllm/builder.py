"""One step: vLLM's metadata becomes a batch and a plan, once for all layers of a KV cache group.

The arrays are read when the first layer runs, not in build(), because vLLM's wrappers (cross attention) change the
metadata after build(). The library reads vLLM's arrays where they lie.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from .. import _abi as abi
from .._library import check, lib, make
from .._oneshot import limit
from ..attention import Attention
from ..batch import Batch
from ..context import torch_context
from ..plan import Plan


@dataclass(eq=False)
class FolioMetadata:
    """One step of a KV cache group, with the names that vLLM's own metadata has."""

    builder: "FolioBuilder"
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Any  # int32 [seqs + 1]
    query_start_loc_cpu: Any  # the same in host memory
    seq_lens: Any  # int32 [seqs]; in cross attention those of the encoder
    block_table: Any  # int32 [seqs, blocks]
    slot_mapping: Any  # int64 [tokens], -1: not stored; in cross attention of the encoder's new tokens
    causal: bool
    dynamic_causal: Optional[Any]  # bool or int32 [seqs]: is this request causal?
    split: Any = None  # the same step for one rank of decode context parallelism


class FolioBuilder:
    """Makes the metadata of each step, and holds the plan that the layers of the group run.

    vllm_config gives the limits, and the layers in compilation_config.static_forward_context.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device
        known = vllm_config.compilation_config.static_forward_context
        layers = {name: known[name] for name in layer_names}
        geometries = {name: layer.impl.geometry(layer.dtype) for name, layer in layers.items()}
        distinct = list(dict.fromkeys(geometries.values()))
        self.numbers = {name: distinct.index(geometry) for name, geometry in geometries.items()}
        self.type: str = layers[layer_names[0]].impl.type
        self.context = torch_context(device)
        self.attentions = [Attention(self.context, **geometry._asdict()) for geometry in distinct]
        self.plan: Any = None
        self.rows = 0  # of q and out, in the step that the plan was updated with
        self._limits: tuple = (0, 0, 0)  # sequences, tokens, longest sequence
        self._blocks = (0, 0)  # number and size
        self._ready: Optional[FolioMetadata] = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FolioMetadata:
        common = common_attn_metadata
        dynamic = None if isinstance(common.causal, bool) else common.causal
        return FolioMetadata(self, common.num_actual_tokens, common.max_query_len, common.max_seq_len,
                             common.query_start_loc, common.query_start_loc_cpu, common.seq_lens,
                             common.block_table_tensor, common.slot_mapping, dynamic is None and common.causal, dynamic)

    def prepare(self, step: FolioMetadata, kv_cache: Any) -> None:
        """Updates the plan with this step. Does nothing if that is what it was last updated with."""
        if self._ready is step:
            return
        self._ready = None
        num_seqs = step.seq_lens.shape[0]
        self.rows = int(step.query_start_loc_cpu[num_seqs])
        blocks = (0, 0) if self.type == "encoder_only" else (kv_cache.shape[0], kv_cache.shape[2])
        on_device = self.device.type != "cpu" and self.type != "encoder_decoder"
        needed = (num_seqs, self.rows, step.max_seq_len) if on_device else (0, 0, 0)
        if self.plan is None or blocks != self._blocks or any(n > most for n, most in zip(needed, self._limits)):
            self._blocks, self._limits = blocks, needed
            if on_device:  # which needs limits: vLLM's, and where a step exceeds one, a power of two
                config = self.vllm_config
                usual = (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens,
                         config.model_config.max_model_len)
                self._limits = tuple(most if n <= most else limit(n) for n, most in zip(needed, usual))
            seqs, tokens, longest = self._limits
            self.plan = Plan(self.attentions, types=self.type, num_blocks=blocks[0], block_size=blocks[1],
                             max_seqs=seqs, max_query_tokens=tokens, max_seq_len=longest,
                             batch_invariant=os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"))
            self.batch = Batch(self.context, block_size=blocks[1])
        if self.type == "encoder_decoder":  # queries of this step over the encoder's keys, which impl has written
            starts = step.query_start_loc_cpu.numpy()
            self.batch.set_block_tables(None, np.maximum(np.diff(starts), 1), starts,
                                        encoder_lens=step.seq_lens.cpu().numpy(),
                                        cross_block_tables=step.block_table.cpu().numpy())
            self.plan.update(self.batch)
        elif on_device:  # from arrays in its memory, without waiting
            stored = self.type != "encoder_only"
            self.plan.update_device(seq_lens=step.seq_lens, query_start=step.query_start_loc,
                                    num_query_tokens=self.rows, block_tables=step.block_table if stored else None,
                                    slot_mapping=step.slot_mapping[:self.rows] if stored else None,
                                    causality_per_seq=self._causality(step) if stored else None)
        else:
            self._update_host(step)
        self._ready = step

    def _update_host(self, step: FolioMetadata) -> None:
        """Decoder and encoder-only attention on CPUs."""
        given = make(abi.folio_step, num_seqs=step.seq_lens.shape[0], query_start=step.query_start_loc.data_ptr(),
                     seq_lens=step.seq_lens.data_ptr())
        causality = None
        if self.type != "encoder_only":
            table = step.block_table
            given.table = abi.folio_table(kind=abi.FOLIO_TABLE_ROWS, indices=table.data_ptr(),
                                          row_stride=table.stride(0))
            given.slots = step.slot_mapping.data_ptr()
            causality = self._causality(step)
            if causality is not None:
                given.causality = causality.data_ptr()
        check(lib.folio_plan_update_step(self.plan, ctypes.byref(given), None))

    def _causality(self, step: FolioMetadata) -> Any:
        """folio_causality of each request, int32 [seqs]; None: all are causal."""
        if step.dynamic_causal is not None:
            return 2 - step.dynamic_causal.bool().int()
        if step.causal:
            return None
        return step.seq_lens.new_full(step.seq_lens.shape, abi.FOLIO_CAUSAL_NO)
