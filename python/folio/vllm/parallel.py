"""vLLM's decode context parallelism: the ranks of a group share the KV heads, and each caches a part of the tokens.

    1  q is gathered: each rank attends with the heads of all ranks over the tokens that it has cached before this step
    2  the results are gathered: each rank merges those of its own heads with its attention over the step's new tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import _oneshot
from .._arrays import dtype_of
from ..attention import Geometry
from ..functional import merge_states
from .builder import FolioBuilder, FolioMetadata


class Split:
    """A step of one rank in host memory, read once for all layers."""

    def __init__(self, step: FolioMetadata, world_size: int, rank: int, interleave: int) -> None:
        lens = step.seq_lens.cpu().numpy()
        starts = step.query_start_loc_cpu.numpy()[:lens.size + 1]
        new = np.diff(starts)
        # tokens go to the ranks in turn, `interleave` at a time
        rounds, rest = np.divmod(lens - new, interleave * world_size)
        mine = rounds * interleave + np.clip(rest - rank * interleave, 0, interleave)
        tables = step.block_table.cpu().numpy()
        self.cached = _oneshot.HostStep(starts, mine.astype(np.int32), tables, False, cross=True)
        self.new = _oneshot.HostStep(starts, new.astype(np.int32), None, step.causal)
        self.slots = step.slot_mapping.cpu()[:int(starts[-1])]  # -1: another rank's token
        self.any_cached = bool((lens > new).any())  # the same on all ranks, which gather only then


def forward(impl: Any, builder: FolioBuilder, step: FolioMetadata, q: Any, k: Any, v: Any, kv_cache: Any,
            out: Any) -> None:
    """Attention of one layer. q [tokens, heads, size], k and v [tokens, kv_heads, size] -> out, like q."""
    if step.split is None:
        interleave = builder.vllm_config.parallel_config.cp_kv_cache_interleave_size
        step.split = Split(step, impl.dcp_world_size, impl.dcp_rank, interleave)
    split = step.split
    tokens, (heads, size), world_size = int(split.new.q_start[-1]), q.shape[1:], impl.dcp_world_size
    q, k, v = (x[:tokens].contiguous() for x in (q, k, v))
    cache, dtype = impl._wrap(kv_cache, q.dtype), dtype_of(q.dtype)
    cache.write(0, k, v, split.slots)

    def attend(rows: Any, part: Any, **keys: Any) -> tuple:
        at = _oneshot.attention(builder.context, Geometry(
            rows.shape[1], impl.num_kv_heads, size, size, dtype, dtype, impl.scale, None, impl.logits_soft_cap))
        result, lse = torch.empty_like(rows), rows.new_empty(rows.shape[:2], dtype=torch.float32)
        _oneshot.host_forward(at, part, rows, result, lse, **keys)
        return result, lse

    parts = [attend(q, split.new, k=k, v=v)]
    if split.any_cached:
        group, own = impl.dcp_group(), slice(impl.dcp_rank * heads, (impl.dcp_rank + 1) * heads)
        found = attend(group.all_gather(q, dim=1), split.cached, cache=cache)
        parts += zip(*(group.all_gather(x, dim=0).unflatten(0, (world_size, tokens))[:, :, own] for x in found))
    out[:tokens] = merge_states(parts, context=builder.context)[0]
