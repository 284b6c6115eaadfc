"""bert_padding of FlashAttention, in plain torch: padded batches [seqs, rows, ...] as rows [total, ...], and back."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None) -> tuple:
    """The rows where a mask [seqs, rows] is not 0: (rows [total, ...], their indices [total], cu_seqlens int32 [seqs +
    1], the longest length, lengths by attention_mask alone int32 [seqs]). Rows of unused_mask are taken, too."""
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, lens = taken.flatten().nonzero()[:, 0], taken.sum(1)
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, starts, int(lens.max()), attention_mask.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back: [batch, seqlen, ...] with zeros between the rows."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    out = values.new_zeros((first_axis_dim, *values.shape[1:]))
    out[indices] = values
    return out
