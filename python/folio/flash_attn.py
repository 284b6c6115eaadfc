"""The functions of FlashAttention, with its arguments and its meaning, on CPUs and GPUs.

    from folio.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

The causal mask is aligned to the bottom right: the last query sees the last key. A row that sees no key gets zeros, and
-inf in lse. Tensors are torch's, on the CPU or on a GPU, or NumPy arrays; index arrays lie where q lies, and on a GPU
they are never copied to the host. There is no backward pass and no dropout. Under torch.compile each function is one
operator of the compiled graph.

Plans are kept by geometry and refilled only if lengths or block tables changed. On a GPU a sequence whose lengths or
blocks are invalid gets zeros; so does one with more queries than keys, unless max_seqlen_q > max_seqlen_k says that
there may be some. In a CUDA graph, call the function once with the same shapes before the capture.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, NamedTuple, Optional, get_type_hints

import numpy as np

from . import _abi as abi
from . import _oneshot
from ._arrays import _BY_NAME, array, is_torch, required_array
from ._library import pair
from ._run import empty, place_check, refuse_gradients
from .attention import Rotary
from .context import Context, default_context
from .errors import ArgumentError, UnsupportedError

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None,
                           max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
                           dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
                           *, return_softmax_lse: bool = False, seqused_k: Any = None, s_aux: Any = None,
                           out: Any = None) -> Any:
    """Sequences of different lengths, one after another.

    q [total_q, heads, size]; k, v [total_k, kv_heads, size], or with block_table int32 [seqs, blocks] the pages
    [num_blocks, page_size, kv_heads, size]. cu_seqlens_q and _k: int32 [seqs + 1], where each sequence begins;
    seqused_k int32 [seqs] gives the lengths of the keys instead. s_aux: sinks [heads]. Returns out, or (out, lse
    [heads, total_q]) with return_softmax_lse, or (out, lse, None) with return_attn_probs. `deterministic` changes
    nothing: results always are. Rows behind the last sequence get zeros on a CPU, and hold anything on a GPU; in an
    `out` that was given they stay as they are.
    """
    _check_common(dropout_p, (q, k, v))
    left, right = _window(window_size)
    if cu_seqlens_k is None and seqused_k is None:
        raise ArgumentError("cu_seqlens_k or seqused_k must be given")
    want = bool(return_attn_probs or return_softmax_lse)
    result, lse = _call("flash_attn_varlen", _varlen,
                        (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k),
                        (softmax_scale, causal, left, right, float(softcap or 0.0), alibi_slopes, s_aux, want), out)
    return (result, lse, None) if return_attn_probs else (result, lse) if want else result


def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                    deterministic: bool = False, return_attn_probs: bool = False, *, return_softmax_lse: bool = False,
                    s_aux: Any = None) -> Any:
    """Sequences of one length. q [seqs, queries, heads, size]; k, v [seqs, keys, kv_heads, size]. Returns out, or
    (out, lse [seqs, heads, queries]), or (out, lse, None)."""
    _check_common(dropout_p, (q, k, v))
    left, right = _window(window_size)
    want = bool(return_attn_probs or return_softmax_lse)
    out, lse = _call("flash_attn", _fixed, (q, k, v), (softmax_scale, causal, left, right, float(softcap or 0.0),
                                                       alibi_slopes, s_aux, want))
    return (out, lse, None) if return_attn_probs else (out, lse) if want else out


def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
                            rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
                            cache_leftpad: Any = None, block_table: Any = None, softmax_scale: Optional[float] = None,
                            causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
                            return_softmax_lse: bool = False, *, s_aux: Any = None) -> Any:
    """Attention over a cache, after k and v (if given) were stored in it behind the cached tokens.

    q [seqs, queries, heads, size]; k_cache, v_cache [cache_seqs, max_len, kv_heads, size], or with block_table int32
    [seqs, blocks] the pages [num_blocks, page_size, kv_heads, size]. k, v [seqs, new, kv_heads, size]. cache_seqlens: a
    number or int32 [seqs], the tokens in the cache before k and v. cache_batch_idx [seqs]: which row of the cache each
    sequence has. rotary_cos, rotary_sin [positions, rotary_size / 2] turn k, and q if causal or with a window; they are
    read when first seen. Returns out, or (out, lse [seqs, heads, queries]). num_splits changes nothing.
    """
    _check_common(0.0, (q, k_cache, v_cache, k, v))
    left, right = _window(window_size)
    if cache_leftpad is not None:
        raise UnsupportedError("cache_leftpad is not supported: let each sequence begin at the start of its row")
    if (k is None) != (v is None):
        raise ArgumentError("k is given without v" if v is None else "v is given without k")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("rotary_cos and rotary_sin must both be given, or neither")
    lens, number = (None, cache_seqlens) if isinstance(cache_seqlens, int) else (cache_seqlens, None)
    out, lse = _call("flash_attn_kvcache", _kvcache,
                     (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, lens, number, cache_batch_idx, block_table,
                      rotary_interleaved),
                     (softmax_scale, causal, left, right, float(softcap or 0.0), alibi_slopes, s_aux,
                      return_softmax_lse))
    return (out, lse) if return_softmax_lse else out


# ---- arguments ----


class _Options(NamedTuple):
    """What all functions take. The operators' schemas have the same names and types, after those of _fixed, _varlen and
    _kvcache."""

    scale: Optional[float]
    causal: bool
    left: int  # of the window
    right: int
    softcap: float
    slopes: Optional[Any]
    sinks: Optional[Any]
    lse: bool


def _call(name: str, function: Callable, given: tuple, options: tuple, out: Any = None) -> tuple:
    """(out, lse) by a function, or by its operator in compiled code."""
    if not _compiling():
        return function(*given, _Options(*options)) if out is None else function(*given, _Options(*options), out)
    if out is not None:
        return out, getattr(_torch().ops.folio, name + "_out")(*given, *options, out)
    return getattr(_torch().ops.folio, name)(*given, *options)


def _torch() -> Any:
    return sys.modules["torch"]


def _compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _check_common(dropout_p: float, tensors: tuple) -> None:
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p is {dropout_p}; it must be 0.0: there is no dropout here")
    if is_torch(tensors[0]) and _torch().is_grad_enabled():
        refuse_gradients(*tensors)


def _window(window: Any) -> tuple:
    if window is None or (type(window) is tuple and window == (-1, -1)):
        return -1, -1
    if type(window) in (tuple, list) and None in window:
        window = [-1 if n is None else n for n in window]
    left, right = pair(window, "window_size")
    return max(left, -1), max(right, -1)


def _is_table(block_table: Any) -> bool:
    """Whether there is a block table."""
    if block_table is not None and getattr(block_table, "ndim", 0) != 2:
        shape = tuple(getattr(block_table, "shape", ()))
        raise ArgumentError(f"block_table has shape {shape}; it must be an int32 array [seqs, blocks]")
    return block_table is not None


def _numbers(context: Context, value: Any, name: str, heads: int, seqs: int) -> Any:
    """Slopes or sinks [heads] as f32. Slopes [seqs, heads] are taken if all sequences have the same."""
    shape = tuple(value.shape)
    if len(shape) == 2 and shape == (seqs, heads):
        if seqs > 1 and (not context.on_host or not bool((value == value[:1]).all())):
            raise UnsupportedError(f"{name} has shape {shape}: a row for each sequence is not supported, only "
                                   f"[{heads}]")
        value = value[0] if seqs else value.sum(0)
    elif shape != (heads,):
        raise ArgumentError(f"{name} has shape {shape}; it must be ({heads},)")
    if is_torch(value):
        return value.to(_torch().float32).contiguous()
    return np.ascontiguousarray(value, np.float32)


class _Call:
    """What all functions need: context, geometry, options."""

    def __init__(self, q: Any, k: Any, v: Any, rank: int, dims: str, kv_rank: int, kv_dims: str) -> None:
        self.q, self.k, self.v = array(q), array(k), array(v)
        if len(self.q.shape) != rank or len(self.k.shape) != kv_rank:
            name, a, dims = ("q", self.q, dims) if len(self.q.shape) != rank else ("k", self.k, kv_dims)
            raise ArgumentError(f"{name} has shape {tuple(a.shape)}; it must be [{dims}]")
        if self.v.shape[:-1] != self.k.shape[:-1]:
            raise ArgumentError(f"k has shape {tuple(self.k.shape)}, but v has {tuple(self.v.shape)}")
        if self.k.shape[-1] != self.q.shape[-1]:
            raise ArgumentError(f"the heads of q have {self.q.shape[-1]} numbers, but those of k {self.k.shape[-1]}")
        self.context = default_context(self.q.device)
        self.heads, self.kv_heads, self.v_size = self.q.shape[-2], self.k.shape[-2], self.v.shape[-1]
        place_check(self.context, self.k, "k")
        place_check(self.context, self.v, "v")

    def prepare(self, o: _Options, q: Any, seqs: int, rows: int) -> tuple:
        """Attention and options; returns out [rows, heads, v_size] and lse [heads, rows]."""
        scale, causal, left, right, softcap, self.slopes, self.sinks, want_lse = o
        if self.slopes is not None:
            self.slopes = _numbers(self.context, self.slopes, "alibi_slopes", self.heads, seqs)
        if self.sinks is not None:
            self.sinks = _numbers(self.context, self.sinks, "s_aux", self.heads, seqs)
        window = (left, 0 if causal else right) if left >= 0 or (right >= 0 and not causal) else (-1, -1)
        self.at = _oneshot.attention(self.context, self.heads, self.kv_heads, self.q.shape[-1], self.v_size,
                                     self.q.dtype, self.k.dtype, scale, window, softcap)
        dtype = _BY_NAME.get(self.q.dtype)
        if dtype is None:
            raise ArgumentError(f"q has dtype {self.q.dtype}; it must be f32, f16 or bf16")
        out = empty(self.context, (rows, self.heads, self.v_size), dtype, q)
        return out, empty(self.context, (self.heads, rows), abi.FOLIO_F32, q) if want_lse else None


def _starts(value: Any, name: str, rows: int) -> np.ndarray:
    starts = required_array(value, np.int32, name)
    if starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > rows:
        raise ArgumentError(f"{name} must start at 0, never decrease, and end at most at {rows}, the number of rows")
    return starts


# ---- sequences one after another ----


def _varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Optional[Any], max_q: Optional[int], max_k: Optional[int],
            block_table: Optional[Any], used: Optional[Any], o: _Options, out: Any = None) -> tuple:
    paged = _is_table(block_table)
    if not hasattr(cu_q, "__len__"):
        raise ArgumentError(f"cu_seqlens_q is {cu_q!r}; it must be int32 [seqs + 1]")
    call = _Call(q, k, v, 3, "total_q, heads, size", 4 if paged else 3,
                 "num_blocks, page_size, kv_heads, size" if paged else "total_k, kv_heads, size")
    seqs = len(cu_q) - 1
    result, lse = call.prepare(o, q, seqs, call.q.shape[0])
    if out is not None:
        result = out
    rows_lse = None if lse is None else lse.T
    if seqs < 1:  # all rows are behind the last sequence
        if call.context.on_host and out is None:
            _fill_unseen(result, rows_lse, None)
    elif call.k.shape[0] == 0:  # nobody sees a key, and the library takes no cache without blocks
        _fill_unseen(result, rows_lse, call.sinks)
    elif call.context.on_host:
        _varlen_host(call, o, q, k, v, cu_q, cu_k, block_table, used, result, rows_lse, out is None)
    else:
        _varlen_device(call, o.causal, q, k, v, cu_q, cu_k, max_q, max_k, block_table, used, result, rows_lse)
    return result, lse


def _varlen_host(call: _Call, o: _Options, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, block_table: Any, used: Any,
                 out: Any, lse: Any, fresh: bool) -> None:
    causal, slopes, sinks = o.causal, call.slopes, call.sinks
    plain = not causal and o.left < 0 and o.right < 0 and slopes is None
    key = ("varlen", call.q.shape[0], call.k.shape[0], causal, plain, _oneshot.contents(cu_q, "cu_seqlens_q"),
           _oneshot.contents(cu_k, "cu_seqlens_k"), _oneshot.contents(used, "seqused_k"),
           _oneshot.contents(block_table, "block_table"))
    step, total, rows, size = _oneshot.kept.steps.find(
        key, _varlen_step, (call, cu_q, cu_k, causal, plain, block_table, used))
    if total < call.q.shape[0]:
        _fill_unseen(out[total:] if fresh else out[:0], None if lse is None else lse[total:], None)
        q, out, lse = q[:total], out[:total], None if lse is None else lse[:total]
    if block_table is not None:
        _oneshot.host_forward(call.at, step, q, out, lse, cache=_paged(call), slopes=slopes, sinks=sinks)
    elif size:
        cache = _rows_as_blocks(call, rows, size)
        _oneshot.host_forward(call.at, step, q, out, lse, cache=cache, slopes=slopes, sinks=sinks)
    elif rows == 0:
        _fill_unseen(out, lse, sinks)
    else:
        if rows < call.k.shape[0]:
            k, v = k[:rows], v[:rows]
        _oneshot.host_forward(call.at, step, q, out, lse, k=k, v=v, slopes=slopes, sinks=sinks)


def _varlen_step(call: _Call, cu_q: Any, cu_k: Any, causal: bool, plain: bool, block_table: Any, used: Any) -> tuple:
    """(step, rows of q, rows of k, tokens of a block if rows of k become blocks, else 0)."""
    starts = _starts(cu_q, "cu_seqlens_q", call.q.shape[0])
    seqs, total, rows = starts.size - 1, int(starts[-1]), call.k.shape[0]
    k_starts = starts if cu_k is None else _starts(cu_k, "cu_seqlens_k", rows if block_table is None else 2**31)
    lens = required_array(used, np.int32, "seqused_k") if used is not None else np.diff(k_starts).astype(np.int32)
    if lens.shape != (seqs,):
        raise ArgumentError(f"there are {seqs} sequences of queries, but {lens.size} of keys")
    if block_table is not None:
        return _oneshot.HostStep(starts, lens, _tables(block_table, seqs), causal), total, 0, 0
    if cu_k is None:
        raise ArgumentError("cu_seqlens_k is missing; without block_table it says where each sequence of k begins")
    if used is None and (plain or np.array_equal(starts, k_starts)):
        return _oneshot.HostStep(starts, lens, None, causal), total, int(k_starts[-1]), 0
    if (k_starts[:-1] + lens > rows).any():
        raise ArgumentError(f"k has {rows} rows, but a sequence ends at {int((k_starts[:-1] + lens).max())}")
    # blocks as large as the begins of all sequences allow
    size = _oneshot.block_of(math.gcd(int(np.gcd.reduce(k_starts[:-1])), rows))
    width = -(-int(lens.max(initial=1)) // size)
    tables = np.minimum(k_starts[:-1, None] // size + np.arange(width)[None], rows // size - 1).astype(np.int32)
    return _oneshot.HostStep(starts, lens, tables, causal), total, rows, size


def _fill_unseen(out: Any, lse: Any, sinks: Any) -> None:
    out[...] = 0
    if lse is not None:
        lse[...] = -math.inf if sinks is None else sinks[None]


def _paged(call: _Call) -> Any:
    k, v = call.k, call.v
    return _oneshot.wrap(call.context, k, v, k.shape[0], k.shape[1], call.kv_heads, tuple(k.strides[:3]),
                         tuple(v.strides[:3]))


def _tables(block_table: Any, seqs: int) -> np.ndarray:
    tables = required_array(block_table, np.int32, "block_table")
    if tables.ndim != 2 or tables.shape[0] != seqs:
        raise ArgumentError(f"block_table has shape {tables.shape}; it must be [{seqs}, blocks]")
    return tables


def _rows_as_blocks(call: _Call, rows: int, size: int) -> Any:
    (k_token, k_head, _), (v_token, v_head, _) = call.k.strides, call.v.strides
    return _oneshot.wrap(call.context, call.k, call.v, rows // size, size, call.kv_heads,
                         (k_token * size, k_token, k_head), (v_token * size, v_token, v_head))


def _varlen_device(call: _Call, causal: bool, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Optional[int],
                   max_k: Optional[int], block_table: Any, used: Any, out: Any, lse: Any) -> None:
    torch = _torch()
    rows = call.q.shape[0]
    same = block_table is None and used is None and cu_q.data_ptr() == cu_k.data_ptr()
    lens = used if used is not None else cu_k[1:] - cu_k[:-1]
    cache, tables, longest = None, None, _oneshot.limit(max_k or max_q or rows)
    if block_table is not None:
        cache, tables = _paged(call), block_table
        longest = tables.shape[1] * cache.block_size
    elif not same:
        if max_k is None:
            raise ArgumentError("max_seqlen_k is missing; on a GPU it must be given")
        cache = _rows_as_blocks(call, call.k.shape[0], 1)
        tables = (cu_k[:-1, None] + torch.arange(longest, dtype=torch.int32, device=cu_k.device)).clamp_(
            max=call.k.shape[0] - 1)
    more = cache is not None and (max_q or rows) > (max_k or longest)
    device_forward(call.at, q, out, lse, None if more else cu_q, lens, max_q or rows, longest, causal=causal,
                   cache=cache, tables=tables, k=k if same else None, v=v if same else None, slopes=call.slopes,
                   sinks=call.sinks, each_row=(cu_q, lens) if more else None)


def device_forward(at: Any, q: Any, out: Any, lse: Any, starts: Any, lens: Any, query_len: int, longest: int, *,
                   causal: bool, cache: Any = None, tables: Any = None, k: Any = None, v: Any = None,
                   slopes: Any = None, sinks: Any = None, rotary: Any = None, each_row: Optional[tuple] = None) -> None:
    """Attention on a GPU, from lengths and tables there. each_row: (starts, lens) of sequences that may have more rows
    than keys; then each row becomes a sequence of its own."""
    torch = _torch()
    extra: dict = {}
    if each_row is not None:
        starts_q, lens = each_row
        row = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        seq = (torch.searchsorted(starts_q, row, right=True) - 1).clamp_(max=lens.shape[0] - 1)
        first = lens - (starts_q[1:] - starts_q[:-1]) - starts_q[:-1]
        extra = {"first_query_pos": (first[seq] + row).long(),
                 "first_key_pos": torch.zeros_like(row, dtype=torch.int64)}
        lens, tables, starts, query_len = lens[seq], tables[seq], None, 1
    seqs = lens.shape[0]
    plan = _oneshot.device_plan(at, cache.block_size if cache else 0, cache.num_blocks if cache else 0, seqs,
                                q.shape[0], query_len, longest)
    plan.update_device(seq_lens=lens, block_tables=tables, query_start=starts, num_query_tokens=q.shape[0],
                       causality_per_seq=None if causal else _oneshot.not_causal(seqs, lens), **extra)
    plan.forward(q, k, v, cache=cache, out=out, lse=lse, slopes=slopes, sinks=sinks, rotary=rotary)


# ---- sequences of one length ----


def _joined(x: Any) -> Any:
    """[seqs, rows, heads, size] as [seqs * rows, heads, size]."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])


def _rows_lse(lse: Any, seqs: int) -> Any:
    """lse [heads, seqs * rows] as [seqs, heads, rows]."""
    if lse is None:
        return None
    lse = lse.reshape(lse.shape[0], seqs, -1) if seqs else lse.reshape(lse.shape[0], 0, 0)
    return lse.transpose(0, 1) if is_torch(lse) else lse.transpose(1, 0, 2)


def _fixed(q: Any, k: Any, v: Any, o: _Options) -> tuple:
    call = _Call(q, k, v, 4, "seqs, queries, heads, size", 4, "seqs, keys, kv_heads, size")
    seqs, queries, keys = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    if call.k.shape[0] != seqs:
        raise ArgumentError(f"q has {seqs} sequences, but k has {call.k.shape[0]}")
    out, lse = call.prepare(o, q, seqs, seqs * queries)
    if seqs * queries and keys == 0:
        _fill_unseen(out, None if lse is None else lse.T, call.sinks)
    elif seqs * queries:
        _fixed_run(call, q, k, v, seqs, queries, keys, o.causal, out, None if lse is None else lse.T)
    return out.reshape(seqs, queries, call.heads, call.v_size), _rows_lse(lse, seqs)


def _fixed_run(call: _Call, q: Any, k: Any, v: Any, seqs: int, queries: int, keys: int, causal: bool, out: Any,
               lse: Any) -> None:
    q, cache, tables = _joined(q), None, None
    options: dict = {"slopes": call.slopes, "sinks": call.sinks}
    if queries == keys:
        options.update(k=_joined(k), v=_joined(v))
    else:
        cache, width = _oneshot.cache_rows(call.context, call.k, call.v)
    if call.context.on_host:
        step = _oneshot.kept.steps.find(("fixed", seqs, queries, keys, causal), lambda: _oneshot.HostStep(
            np.arange(seqs + 1, dtype=np.int32) * queries, np.full(seqs, keys, np.int32), None if cache is None else
            np.arange(seqs * width, dtype=np.int32).reshape(seqs, width), causal))
        _oneshot.host_forward(call.at, step, q, out, lse, cache=cache, **options)
        return
    torch = _torch()
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=q.device) * queries
    lens = starts.new_full((seqs,), keys)
    if cache is not None:
        tables = torch.arange(seqs * width, dtype=torch.int32, device=q.device).view(seqs, width)
    more = queries > keys
    device_forward(call.at, q, out, lse, None if more else starts, lens, queries, keys, causal=causal, cache=cache,
                   tables=tables, each_row=(starts, lens) if more else None, **options)


# ---- with a cache ----


def _kvcache(q: Any, k_cache: Any, v_cache: Any, k: Optional[Any], v: Optional[Any], cos: Optional[Any],
             sin: Optional[Any], lens: Optional[Any], len_number: Optional[int], batch_idx: Optional[Any],
             block_table: Optional[Any], interleaved: bool, o: _Options) -> tuple:
    paged = _is_table(block_table)
    call = _Call(q, k_cache, v_cache, 4, "seqs, queries, heads, size", 4,
                 "num_blocks, page_size, kv_heads, size" if paged else "cache_seqs, max_len, kv_heads, size")
    seqs, queries = call.q.shape[0], call.q.shape[1]
    new = 0 if k is None else k.shape[1]
    if lens is None:
        lens = len_number
    if lens is None and new:
        raise ArgumentError("cache_seqlens is missing; with k and v it says where they go")
    rotary = _rotary(call, cos, sin, interleaved, queries, new, o.causal or o.left >= 0 or o.right >= 0)
    out, lse = call.prepare(o, q, seqs, seqs * queries)
    if seqs * queries:
        if block_table is not None:
            if batch_idx is not None:
                raise UnsupportedError("cache_batch_idx is not supported with block_table: reorder the table's rows")
            cache, width = _paged(call), block_table.shape[1]
        else:
            cache, width = _oneshot.cache_rows(call.context, call.k, call.v)
        run = _kvcache_host if call.context.on_host else _kvcache_device
        run(call, _joined(q), cache, width, k, v, new, lens, batch_idx, block_table, seqs, queries, out,
            None if lse is None else lse.T, o.causal,
            {"slopes": call.slopes, "sinks": call.sinks, "rotary": rotary}, (k_cache, v_cache))
    return out.reshape(seqs, queries, call.heads, call.v_size), _rows_lse(lse, seqs)


def _rotary(call: _Call, cos: Any, sin: Any, interleaved: bool, queries: int, new: int,
            turns: bool) -> Optional[Rotary]:
    if cos is None:
        return None
    if new != queries:
        raise UnsupportedError(f"rotary_cos: k has {new} new tokens and q {queries} rows; with rotary they must "
                               "be equal")
    if queries > 1 and not turns:
        raise UnsupportedError("rotary_cos without causal and without a window is supported for one query only")
    a, b = array(cos), array(sin)
    if len(a.shape) != 2 or tuple(a.shape) != tuple(b.shape):
        raise ArgumentError(f"rotary_cos has shape {tuple(a.shape)}, rotary_sin {tuple(b.shape)}; both must be "
                            "[positions, rotary_size / 2]")
    key = (call.context, a.data, b.data, tuple(a.shape), a.strides, a.dtype, interleaved)

    def build() -> tuple:
        tables = [np.asarray(x.float().cpu() if is_torch(x) else x, np.float32) for x in (cos, sin)]
        made = Rotary(call.context, num_dims=2 * a.shape[1], num_positions=a.shape[0], cos=tables[0], sin=tables[1],
                      pairing="pairs" if interleaved else "halves")
        return made, cos, sin  # which keeps the addresses from being used again

    return _oneshot.kept.rotaries.find(key, build)[0]


def _kvcache_host(call: _Call, q: Any, cache: Any, width: int, k: Any, v: Any, new: int, lens: Any,
                  batch_idx: Any, block_table: Any, seqs: int, queries: int, out: Any, lse: Any, causal: bool,
                  options: dict, caches: tuple) -> None:
    key = ("kvcache", seqs, queries, new, call.k.shape[0], width, cache.block_size, causal,
           _oneshot.contents(lens, "cache_seqlens"), _oneshot.contents(batch_idx, "cache_batch_idx"),
           _oneshot.contents(block_table, "block_table"))
    step, slots = _oneshot.kept.steps.find(key, _kvcache_step, (
        call.k.shape[0], cache.block_size, width, new, lens, batch_idx, block_table, seqs, queries, causal))
    if slots is not None:
        cache.write(0, _joined(k), _joined(v), slots)
    elif new:
        options.update(k=_joined(k), v=_joined(v))
    _oneshot.host_forward(call.at, step, q, out, lse, cache=cache, **options)


def _kvcache_step(rows: int, block_size: int, width: int, new: int, lens: Any, batch_idx: Any, block_table: Any,
                  seqs: int, queries: int, causal: bool) -> tuple:
    """(step, slots of k and v if these are written apart from the step, else None)."""
    capacity = width * block_size
    if lens is None or isinstance(lens, int):
        before = np.full(seqs, capacity if lens is None else lens, np.int32)
    else:
        before = required_array(lens, np.int32, "cache_seqlens")
    if before.shape != (seqs,):
        raise ArgumentError(f"cache_seqlens has shape {before.shape}; it must be ({seqs},)")
    total = (before + new).astype(np.int32)
    wrong = (before < 0) | (total > capacity)
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise ArgumentError(f"cache_seqlens[{bad}] = {before[bad]}, with {new} new tokens, is outside [0, {capacity}], "
                            "the room of its row")
    if block_table is not None:
        tables = _tables(block_table, seqs)
    else:
        index = np.arange(seqs) if batch_idx is None else required_array(batch_idx, np.int32, "cache_batch_idx")
        if index.shape != (seqs,) or (index < 0).any() or (index >= rows).any():
            raise ArgumentError(f"cache_batch_idx must have {seqs} entries in [0, {rows}), the rows of the cache; "
                                f"q has {seqs} sequences")
        tables = (index[:, None] * width + np.arange(width)[None]).astype(np.int32)
    step = _oneshot.HostStep(np.arange(seqs + 1, dtype=np.int32) * queries, total, tables, causal)
    if not new or new == queries:
        return step, None
    places = before[:, None].astype(np.int64) + np.arange(new)[None]
    blocks = np.take_along_axis(tables, places // block_size, 1).astype(np.int64)
    return step, (blocks * block_size + places % block_size).ravel()


def _kvcache_device(call: _Call, q: Any, cache: Any, width: int, k: Any, v: Any, new: int, lens: Any,
                    batch_idx: Any, block_table: Any, seqs: int, queries: int, out: Any, lse: Any, causal: bool,
                    options: dict, caches: tuple) -> None:
    torch = _torch()
    int32 = {"dtype": torch.int32, "device": q.device}
    capacity = width * cache.block_size
    if lens is None or isinstance(lens, int):
        before = torch.full((seqs,), capacity if lens is None else lens, **int32)
    else:
        before = lens
    if block_table is not None:
        tables = block_table
    else:
        index = torch.arange(seqs, **int32) if batch_idx is None else batch_idx.to(torch.int32)
        tables = index[:, None] * width + torch.arange(width, **int32)[None]
    total = before + new if new else before
    if new and new != queries:
        places = before[:, None].long() + torch.arange(new, device=q.device)[None]
        blocks = tables.gather(1, places // cache.block_size).long()
        flat = (blocks // width, (blocks % width) * cache.block_size) if block_table is None else (blocks, 0)
        where = flat[0], places % cache.block_size + flat[1]
        for rows, target in ((k, caches[0]), (v, caches[1])):
            target[where] = rows.to(target.dtype)
        new = 0
    if new:
        options.update(k=_joined(k), v=_joined(v))
    starts = torch.arange(seqs + 1, **int32) * queries if queries > 1 else None
    more = queries > capacity
    if more:
        options["each_row"] = (starts, total)
    device_forward(call.at, q, out, lse, None if more else starts, total, queries, capacity, causal=causal, cache=cache,
                   tables=tables, **options)


# ---- operators, for torch.compile ----


def _define() -> None:
    import torch

    from .torch import define

    names = {Any: "Tensor", Optional[Any]: "Tensor?", Optional[int]: "SymInt?", Optional[float]: "float?", bool: "bool",
             int: "int", float: "float"}
    written = {"k_cache": "(a!)", "v_cache": "(b!)"}
    options = get_type_hints(_Options)
    count = len(options)

    def schema(function: Callable) -> str:
        given = {name: kind for name, kind in get_type_hints(function).items() if name not in ("o", "out", "return")}
        return ", ".join(f"{names[kind]}{written.get(name, '')} {name}" for name, kind in (given | options).items())

    def operator(function: Callable) -> Callable:
        def run(*given: Any, out: tuple = ()) -> tuple:
            result, lse = function(*given[:-count], _Options(*given[-count:]), *out)
            return result, given[0].new_empty((0,), dtype=torch.float32) if lse is None else lse
        return run

    def varlen_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))
        return out, q.new_empty((q.shape[1], q.shape[0]) if rest[-1] else (0,), dtype=torch.float32)

    def batched_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
        seqs, rows, heads, _ = q.shape
        out = q.new_empty((seqs, rows, heads, v.shape[-1]))
        if not rest[-1]:
            return out, q.new_empty((0,), dtype=torch.float32)
        return out, q.new_empty((heads, seqs, rows), dtype=torch.float32).transpose(0, 1)

    for name, function, fake in (("flash_attn_varlen", _varlen, varlen_fake), ("flash_attn", _fixed, batched_fake),
                                 ("flash_attn_kvcache", _kvcache, batched_fake)):
        define(f"{name}({schema(function)}) -> (Tensor, Tensor)", operator(function), fake)
    define(f"flash_attn_varlen_out({schema(_varlen)}, Tensor(a!) out) -> Tensor",
           lambda *given: operator(_varlen)(*given[:-1], out=given[-1:])[1], lambda *given: varlen_fake(*given[:-1])[1])


try:
    _define()
except ImportError:  # without torch: NumPy arrays only
    pass
