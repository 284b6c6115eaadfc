"""Attention in one call, and merging of partial results."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Sequence

import numpy as np

from . import _abi as abi
from ._arrays import address, array, host_array, table_array
from ._library import check, handle_of, integer, lib, make, pair
from ._run import Torch, compiling, empty, lse_array, run_of, tensor
from .batch import causality, rows_table
from .cache import KVCache
from .context import Context, default_context, given_or_default
from .errors import ArgumentError, UnsupportedError
from .plan import Dims, options, run_layer


def attend(q: Any, k: Any = None, v: Any = None, *, cache: Optional[KVCache] = None, layer: int = 0,
           block_tables: Any = None, seq_lens: Any = None, query_start: Any = None, causal: bool = True,
           window: Optional[Sequence[int]] = None, scale: Optional[float] = None, soft_cap: Optional[float] = None,
           slopes: Any = None, sinks: Any = None, k_scale: float = 0.0, v_scale: float = 0.0, out: Any = None,
           lse: bool = False, context: Optional[Context] = None, stream: Optional[int] = None) -> Any:
    """Decoder attention of one layer in one call. Returns out, or (out, lse).

    q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size]: the rows of all sequences, one after
    another. query_start [seqs + 1]: where each begins (None: one sequence). Without a cache each row sees the rows of
    its own sequence. With a cache, k and v (if given) are stored as the last tokens of each sequence, in the blocks of
    its row of block_tables [seqs, blocks], and each row sees all seq_lens[i] keys of its sequence. Without seq_lens no
    token is cached before. There is no backward pass.

    It plans anew in each call. An engine makes a Plan once. Under torch.compile(fullgraph=True) use folio.torch.Layer.
    """
    if compiling():
        sys.modules["torch"]._dynamo.graph_break(msg="folio.attend does not compile: use folio.torch.Layer there")
    tokens, heads, size = _dims(q, "q", "heads")
    if cache is not None:
        handle_of(cache, KVCache, "cache")
    if context is None:
        context = cache.context if cache is not None else default_context(array(q).device)
    ctx = given_or_default(context)
    starts = host_array(query_start, np.int32, "query_start")
    lens = host_array(seq_lens, np.int32, "seq_lens")
    num_seqs = starts.size - 1 if starts is not None else lens.size if lens is not None else 1
    for name, value, count in (("query_start", starts, num_seqs + 1), ("seq_lens", lens, num_seqs)):
        if value is not None and value.shape != (count,):
            raise ArgumentError(f"{name} has shape {value.shape}; it must be ({count},)")
    tables = table_array(block_tables, "block_tables", num_seqs)
    if k is not None:
        kv_heads, v_size = _dims(k, "k")[1], (_dims(v, "v")[2] if v is not None else 0)
    elif cache is not None:
        kv_heads, v_size = cache.num_kv_heads, cache.v_head_size
    else:
        raise ArgumentError("k and v are missing; without them a cache must be given")
    v_size = v_size or (cache.v_head_size if cache else size)
    if tables is not None and lens is None:
        lens = np.full(num_seqs, tokens // max(num_seqs, 1), np.int32) if starts is None else np.diff(starts)
    at = make(abi.folio_attention_desc, num_heads=heads, num_kv_heads=kv_heads, k_head_size=size, v_head_size=v_size,
              scale=scale, soft_cap=soft_cap)
    step = make(abi.folio_step, num_seqs=num_seqs, causality_default=causality(causal), query_start=address(starts),
                seq_lens=address(lens), table=rows_table(tables))
    left, right = (-1, -1) if window is None else pair(window, "window")
    if (left, right) != (-1, -1):
        at.windowed, at.window_left, at.window_right = 1, left, right
    dims, tail = Dims(heads, kv_heads, size, v_size, heads * size), b""
    if slopes is not None or sinks is not None or k_scale or v_scale:
        tail, keep = options(ctx, dims, slopes, sinks, None, k_scale, v_scale)
    first = (ctx._as_parameter_, ctypes.byref(at), abi.FOLIO_ATTENTION_DECODER, ctypes.byref(step))
    return run_layer(lib.folio_attend, first, ctx, dims, q, k, v, cache, integer(layer, "layer"), out, bool(lse), tail,
                     stream)


def _dims(value: Any, name: str, heads: str = "kv_heads") -> tuple:
    shape = tuple(value.shape if hasattr(value, "shape") else array(value).shape)
    if len(shape) != 3:
        raise ArgumentError(f"{name} has shape {tuple(array(value).shape)}; it must be [tokens, {heads}, head_size]")
    return shape


def merge_states(parts: Sequence[tuple], *, context: Optional[Context] = None, stream: Optional[int] = None) -> tuple:
    """(out, lse) over all keys from (out, lse) over parts of them, folded from the first part to the last."""
    if not parts:
        raise ArgumentError("parts is empty")
    first = array(parts[0][0])
    if len(first.shape) != 3:
        raise ArgumentError(f"out of part 0 has shape {tuple(first.shape)}; it must be [tokens, heads, head_size]")
    ctx = given_or_default(context, first.device)
    tokens, heads, size = first.shape
    states, keep = (abi.folio_state * len(parts))(), []
    for i, (part, part_lse) in enumerate(parts):
        if Torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (part, part_lse)):
            raise UnsupportedError(f"part {i} requires a gradient, but there is no backward pass: call this under "
                                   "torch.no_grad() or torch.inference_mode()")
        a = lse_array(ctx, part_lse, f"lse of part {i}", tokens, heads)
        fields, owner = tensor(ctx, part, f"out of part {i}", heads, size)
        keep.append((a, owner))
        states[i] = abi.folio_state(fields, a.data, a.strides[0], a.strides[1])
    merge = make(abi.folio_merge, num_heads=heads, head_size=size, num_parts=len(parts),
                 parts=ctypes.addressof(states))
    dtype = states[0].out.dtype
    out = empty(ctx, (tokens, heads, size), dtype, parts[0][0])
    lse = empty(ctx, (tokens, heads), abi.FOLIO_F32, parts[0][0])
    merge.out, merge.lse = tensor(ctx, out, "out", heads, size)[0], array(lse).data
    check(lib.folio_state_merge(ctx._as_parameter_, ctypes.byref(merge), run_of(ctx, parts[0][0], stream)))
    return out, lse
