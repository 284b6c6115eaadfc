"""What the functions of folio.flash_attn do: arguments, steps in host memory, steps on a GPU, operators."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, get_type_hints

import numpy as np

from .. import _abi as abi
from .. import _oneshot
from .._arrays import _BY_NAME, array, is_torch, numpy_dtype, required_array, starts_check, table_array
from .._library import pair
from .._run import compiling, empty, place_check, refuse_gradients
from ..attention import Geometry, Rotary
from ..context import Context, default_context
from ..errors import ArgumentError, UnsupportedError
from . import _device
from ._device import by_sequence, joined
from .layers.rotary import count, places, rotate

_NO_EFFECT = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_OF_HEADS = (("alibi_slopes", "slopes"), ("s_aux", "sinks"), ("k_descale", "k_head_scales"),
             ("v_descale", "v_head_scales"))  # arguments, in the order of _Options, and fields of a forward
_REFUSED = {"q_descale": "q is f32, f16 or bf16 here: multiply it by its scale",
            "attention_chunk": "use window_size, or one call for each chunk",
            "seqused_q": "let cu_seqlens_q count only the rows that are used"}


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
    k_scales: Optional[Any]
    v_scales: Optional[Any]
    lse: bool


def call(name: str, function: Callable, given: tuple, options: tuple, out: Any = None) -> tuple:
    """(out, lse) by a function, or by its operator in compiled code."""
    if compiling():
        if out is not None:
            return out, getattr(_torch().ops.folio, name + "_out")(*given, *options, out)
        return getattr(_torch().ops.folio, name)(*given, *options)
    return _eager(name, function, given, options, out)


def _eager(name: str, function: Callable, given: tuple, options: tuple, out: Any = None) -> tuple:
    more = {} if out is None else {"out": out}
    if _device.on_gpu(given[0]):
        more["same"] = same = _device.call_of(name, 8 if function is _kvcache else 3, given, options)
        found = None if same is None else _device.again(same, out)
        if found is not None:
            return found
    return function(*given, _Options(*options), **more)


def _torch() -> Any:
    return sys.modules["torch"]


def options_of(dropout_p: float, tensors: tuple, others: dict, window: Any, scale: Optional[float], causal: bool,
               softcap: float, *rest: Any) -> tuple:
    """_Options, once they are seen to be valid. rest: those from slopes on."""
    for name, value in others.items():
        if name in _REFUSED and value is not None and not (isinstance(value, int) and value == 0):
            raise UnsupportedError(f"{name} is not supported: {_REFUSED[name]}")
        if name not in _NO_EFFECT and name not in _REFUSED:
            raise TypeError(f"there is no argument {name!r}")
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p is {dropout_p}; it must be 0.0: there is no dropout here")
    if is_torch(tensors[0]) and _torch().is_grad_enabled():
        refuse_gradients(*tensors)
    for x in tensors:
        if x is not None and not hasattr(x, "shape"):
            raise TypeError(f"q, k and v need a shape, which {type(x).__name__} has not: pass np.from_dlpack(x) or "
                            "torch.from_dlpack(x)")
    left = right = -1
    if window is not None and not (type(window) is tuple and window == (-1, -1)):
        if type(window) in (tuple, list) and None in window:
            window = [-1 if n is None else n for n in window]
        left, right = (max(n, -1) for n in pair(window, "window_size"))
    return scale, causal, left, right, float(softcap or 0.0), *rest


def _is_table(block_table: Any) -> bool:
    """Whether there is a block table."""
    if block_table is not None and getattr(block_table, "ndim", 0) != 2:
        shape = tuple(getattr(block_table, "shape", ()))
        raise ArgumentError(f"block_table has shape {shape}; it must be an int32 array [seqs, blocks]")
    return block_table is not None


def _numbers(context: Context, value: Any, name: str, heads: int, seqs: int) -> Any:
    """Slopes, sinks or scales as f32 [heads]; as [seqs, heads] only if the sequences have different ones."""
    shape = tuple(value.shape)
    if shape not in ((heads,), (seqs, heads)):
        raise ArgumentError(f"{name} has shape {shape}; it must be ({heads},) or ({seqs}, {heads})")
    numbers = value.to(_torch().float32).contiguous() if is_torch(value) else np.ascontiguousarray(value, np.float32)
    if len(shape) == 2 and (seqs < 2 or array(value).strides[0] == 0  # as expand() makes
                            or (context.on_host and bool((numbers == numbers[:1]).all()))):
        return numbers[0] if seqs else numbers.sum(0)
    return numbers


def _beside(first: Any, second: Any) -> Any:
    return (_torch().cat if is_torch(first) else np.concatenate)((first, second), -1)


def _wide(x: Any) -> Any:
    """x with zeros behind each head, up to a multiple of 8 numbers."""
    more = -x.shape[-1] % 8
    return _torch().nn.functional.pad(x, (0, more)) if is_torch(x) else np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def _padded(function: Callable, call: "_Call", q: Any, k: Any, v: Any, rest: tuple, o: _Options, same: Any,
            out: Any = None) -> tuple:
    """function(q, k, v, *rest, o, same, out) by heads that are padded."""
    o = o._replace(scale=o.scale or call.q.shape[-1] ** -0.5)
    result, lse = function(_wide(q), _wide(k), _wide(v), *rest, o, same=same,
                           **({} if out is None else {"out": _wide(out)}))
    if out is None:
        out = empty(call.context, (*result.shape[:-1], call.v_size), _BY_NAME[call.q.dtype], q)
    out[...] = result[..., :call.v_size]
    return out, lse


class _Call:
    """What all functions need: context, geometry, options."""

    def __init__(self, q: Any, k: Any, v: Any, rank: int, dims: str, kv_rank: int, kv_dims: str, qv: Any = None,
                 cached: bool = False) -> None:
        self.q, self.k, self.v = array(q), array(k), array(v)
        if len(self.q.shape) != rank or len(self.k.shape) != kv_rank:
            name, a, dims = ("q", self.q, dims) if len(self.q.shape) != rank else ("k", self.k, kv_dims)
            raise ArgumentError(f"{name} has shape {tuple(a.shape)}; it must be [{dims}]")
        if self.v.shape != self.k.shape and self.v.shape[:-1] != self.k.shape[:-1]:
            raise ArgumentError(f"k has shape {tuple(self.k.shape)}, but v has {tuple(self.v.shape)}")
        size, self.v_size = self.k.shape[-1], self.v.shape[-1]
        if size != self.q.shape[-1]:
            raise ArgumentError(f"the heads of q have {self.q.shape[-1]} numbers, but those of k {size}")
        self.context = default_context(self.q.device)
        self.heads, self.kv_heads = self.q.shape[-2], self.k.shape[-2]
        place_check(self.context, self.k, "k")
        place_check(self.context, self.v, "v")
        self.odd, self.latent = (size | self.v_size) & 7, qv is not None
        if self.odd and (cached or self.latent):
            raise UnsupportedError(f"the heads of k and v have {size} and {self.v_size} numbers; in a cache, and with "
                                   "qv, these must be multiples of 8: make it larger, with zeros behind each head")
        if self.latent:
            self.q, self.k = self._latent(size, tuple(qv.shape))

    def _latent(self, size: int, given: tuple) -> tuple:
        """(q, k) with the heads that the library sees: those of v, then those of k, in one row."""
        q, k, v, whole = self.q, self.k, self.v, self.v_size + size
        if given != (*q.shape[:-1], self.v_size):
            raise ArgumentError(f"qv has shape {given}; it must be {(*q.shape[:-1], self.v_size)}")
        behind = v.data + self.v_size * numpy_dtype(_BY_NAME[v.dtype]).itemsize
        same = all(a == b or n == 1 for a, b, n in zip(k.strides, v.strides, k.shape))
        if k.data != behind or k.dtype != v.dtype or not same:
            raise UnsupportedError(f"with qv, k and v must be slices of one array [..., {whole}], v first: "
                                   f"v = x[..., :{self.v_size}], k = x[..., {self.v_size}:]")
        strides = tuple(max(s, whole) if n == 1 else s for s, n in zip(v.strides, v.shape))
        return q._replace(shape=(*q.shape[:-1], whole)), v._replace(shape=(*k.shape[:-1], whole), strides=strides)

    def prepare(self, o: _Options, q: Any, seqs: int, *rows: int) -> tuple:
        """Attention and options; returns out [*rows, heads, v_size], lse [heads, all rows], and lse.T."""
        scale, causal, left, right, softcap, slopes, sinks, k_scales, v_scales, want_lse = o
        self.options: dict[str, Any] = {}
        self.each = False  # whether an option has a row for each sequence
        if self.latent and v_scales is not None:
            raise UnsupportedError("with qv, k_descale is the scale of v too: leave v_descale out")
        for value, (name, field) in () if slopes is sinks is k_scales is v_scales is None else zip(o[5:9], _OF_HEADS):
            if value is not None:
                heads = self.kv_heads if "descale" in name else self.heads
                self.options[field] = numbers = _numbers(self.context, value, name, heads, seqs)
                self.each = self.each or numbers.ndim == 2
        if self.each and (sinks is not None or not self.context.on_host):
            raise UnsupportedError("an option has a row for each sequence; that is supported on the host and without "
                                   "s_aux, else call once for each sequence, or give one row")
        window = (left, 0 if causal else right) if left >= 0 or (right >= 0 and not causal) else (-1, -1)
        self.at = _oneshot.attention(self.context, Geometry(self.heads, self.kv_heads, self.q.shape[-1], self.v_size,
                                                            self.q.dtype, self.k.dtype, scale, window, softcap,
                                                            self.latent))
        dtype = _BY_NAME.get(self.q.dtype)
        if dtype is None:
            raise ArgumentError(f"q has dtype {self.q.dtype}; it must be f32, f16 or bf16")
        out = empty(self.context, (*rows, self.heads, self.v_size), dtype, q)
        if not want_lse:
            return out, None, None
        lse = empty(self.context, (self.heads, math.prod(rows)), abi.FOLIO_F32, q)
        return out, lse, lse.T

    def blocks(self, rows: int, size: int) -> Any:
        """k and v, one sequence after another, as a cache whose blocks have `size` tokens."""
        (k_token, k_head, _), (v_token, v_head, _) = self.k.strides, self.v.strides
        return _oneshot.wrap(self.context, self.k, self.v, rows // size, size, self.kv_heads,
                             (k_token * size, k_token, k_head), (v_token * size, v_token, v_head), self.latent)


def _starts(value: Any, name: str, rows: int) -> np.ndarray:
    return starts_check(required_array(value, np.int32, name), name, rows, "rows")


# ---- sequences one after another ----


def _varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Optional[Any], max_q: Optional[int], max_k: Optional[int],
            block_table: Optional[Any], used: Optional[Any], qv: Optional[Any], o: _Options, out: Any = None,
            same: Any = None) -> tuple:
    paged = _is_table(block_table)
    if not hasattr(cu_q, "__len__"):
        raise ArgumentError(f"cu_seqlens_q is {cu_q!r}; it must be int32 [seqs + 1]")
    call = _Call(q, k, v, 3, "total_q, heads, size", 4 if paged else 3,
                 "num_blocks, page_size, kv_heads, size" if paged else "total_k, kv_heads, size", qv, paged)
    if call.odd:
        return _padded(_varlen, call, q, k, v, (cu_q, cu_k, max_q, max_k, None, used, None), o, same, out)
    seqs = len(cu_q) - 1
    result, lse, rows_lse = call.prepare(o, q, seqs, call.q.shape[0])
    if out is not None:
        result = out
    if call.each:
        return _one_by_one(q, k, v, cu_q, cu_k, block_table, used, qv, o, result, lse, out is None)
    if qv is not None:
        q = _beside(qv, q)
    if seqs < 1:  # all rows are behind the last sequence
        if call.context.on_host and out is None:
            _fill_unseen(result, rows_lse, None)
    elif call.k.shape[0] == 0:  # nobody sees a key, and the library takes no cache without blocks
        _fill_unseen(result, rows_lse, call.options.get("sinks"))
    elif call.context.on_host:
        _varlen_host(call, o, q, k, v, cu_q, cu_k, block_table, used, result, rows_lse, out is None)
    else:
        _varlen_device(call, o.causal, q, k, v, cu_q, cu_k, max_q, max_k, block_table, used, result, lse, same)
    return result, lse


def _varlen_host(call: _Call, o: _Options, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, block_table: Any, used: Any,
                 out: Any, lse: Any, fresh: bool) -> None:
    causal, latent, options = o.causal, call.latent, call.options
    plain = not causal and o.left < 0 and o.right < 0 and "slopes" not in options
    key = ("varlen", call.q.shape[0], call.k.shape[0], causal, plain, latent, _oneshot.contents(cu_q, "cu_seqlens_q"),
           _oneshot.contents(cu_k, "cu_seqlens_k"), _oneshot.contents(used, "seqused_k"),
           _oneshot.contents(block_table, "block_table"))
    step, total, rows, size = _oneshot.kept.steps.find(
        key, _varlen_step, (call, cu_q, cu_k, causal, plain, block_table, used))
    if total < call.q.shape[0]:
        _fill_unseen(out[total:] if fresh else out[:0], None if lse is None else lse[total:], None)
        q, out, lse = q[:total], out[:total], None if lse is None else lse[:total]
    if block_table is not None:
        _oneshot.host_forward(call.at, step, q, out, lse, cache=_paged(call), **options)
    elif size:
        _oneshot.host_forward(call.at, step, q, out, lse, cache=call.blocks(rows, size), **options)
    elif rows == 0:
        _fill_unseen(out, lse, options.get("sinks"))
    else:
        if rows < call.k.shape[0]:
            k, v = k[:rows], v[:rows]
        _oneshot.host_forward(call.at, step, q, out, lse, k=k, v=v, **options)


def _one_by_one(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, block_table: Any, used: Any, qv: Any, o: _Options,
                out: Any, lse: Any, fresh: bool) -> tuple:
    """_varlen with options that have a row for each sequence, on the host."""
    starts = _starts(cu_q, "cu_seqlens_q", q.shape[0])
    k_starts = starts if cu_k is None else required_array(cu_k, np.int32, "cu_seqlens_k")
    lens = np.diff(k_starts) if used is None else required_array(used, np.int32, "seqused_k")
    own = {name: x for name, x in o._asdict().items() if name in ("slopes", "k_scales", "v_scales") and x is not None}
    for i, (a, b) in enumerate(zip(starts, starts[1:])):
        keys = slice(None) if block_table is not None else slice(k_starts[i], k_starts[i] + lens[i])
        part = _varlen(q[a:b], k[keys], v[keys], np.array([0, b - a]), np.array([0, lens[i]]), None, None,
                       None if block_table is None else block_table[i:i + 1], None, None if qv is None else qv[a:b],
                       o._replace(**{name: x[i:i + 1] if x.ndim == 2 else x for name, x in own.items()}), out[a:b])
        if lse is not None:
            lse[:, a:b] = part[1]
    if fresh:
        _fill_unseen(out[starts[-1]:], None if lse is None else lse.T[starts[-1]:], None)
    return out, lse


def _varlen_step(call: _Call, cu_q: Any, cu_k: Any, causal: bool, plain: bool, block_table: Any, used: Any) -> tuple:
    """(step, rows of q, rows of k, tokens of a block if rows of k become blocks, else 0)."""
    starts = _starts(cu_q, "cu_seqlens_q", call.q.shape[0])
    seqs, total, rows = starts.size - 1, int(starts[-1]), call.k.shape[0]
    k_starts = starts if cu_k is None else _starts(cu_k, "cu_seqlens_k", rows if block_table is None else 2**31)
    lens = required_array(used, np.int32, "seqused_k") if used is not None else np.diff(k_starts).astype(np.int32)
    if lens.shape != (seqs,):
        raise ArgumentError(f"there are {seqs} sequences of queries, but {lens.size} of keys")
    if block_table is not None:
        return _oneshot.HostStep(starts, lens, table_array(block_table, "block_table", seqs), causal), total, 0, 0
    if cu_k is None:
        raise ArgumentError("cu_seqlens_k is missing; without block_table it says where each sequence of k begins")
    if used is None and not call.latent and (plain or np.array_equal(starts, k_starts)):
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
    return _oneshot.wrap(call.context, k, v, k.shape[0], k.shape[1], call.kv_heads, k.strides[:3], v.strides[:3],
                         call.latent)


def _varlen_device(call: _Call, causal: bool, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Optional[int],
                   max_k: Optional[int], block_table: Any, used: Any, out: Any, lse: Any, step: Any) -> None:
    rows = call.q.shape[0]
    same = block_table is None and used is None and not call.latent and cu_q.data_ptr() == cu_k.data_ptr()
    cache, longest = None, _oneshot.limit(max_k or max_q or rows)
    if block_table is not None:
        cache = _paged(call)
        longest = block_table.shape[1] * cache.block_size
    elif not same:
        if max_k is None:
            raise ArgumentError("max_seqlen_k is missing; on a GPU it must be given")
        cache = call.blocks(call.k.shape[0], 1)
    more = cache is not None and (max_q or rows) > (max_k or longest)

    def arrays(cu_q: Any, cu_k: Any, _: Any, __: Any, tables: Any, used: Any) -> tuple:
        lens = used if used is not None else cu_k[1:] - cu_k[:-1]
        if rows_k is not None and tables is None:
            tables = (cu_k[:-1, None] + count(cu_k, longest)).clamp_(max=rows_k - 1)
        return cu_q, lens, tables

    rows_k = None if cache is None else call.k.shape[0]
    _device.forward(call.at, q, out, lse, cu_q.shape[0] - 1, rows, max_q or rows, longest, arrays,
                    (cu_q, cu_k, max_q, max_k, block_table, used), step, causal=causal, more=more, cache=cache,
                    k=k if same else None, v=v if same else None, **call.options)


# ---- sequences of one length ----


def _fixed(q: Any, k: Any, v: Any, qv: Optional[Any], o: _Options, same: Any = None) -> tuple:
    call = _Call(q, k, v, 4, "seqs, queries, heads, size", 4, "seqs, keys, kv_heads, size", qv)
    (seqs, queries), keys = call.q.shape[:2], call.k.shape[1]
    if call.k.shape[0] != seqs:
        raise ArgumentError(f"q has {seqs} sequences, but k has {call.k.shape[0]}")
    if call.odd:
        return _padded(_fixed, call, q, k, v, (None,), o, same)
    direct = keys == 0 or (keys == queries and not call.latent)
    if direct:
        out, lse, rows_lse = call.prepare(o, q, seqs, seqs, queries)
    if not direct or call.each:  # the keys are all of a cache
        return _kvcache(q, k, v, None, None, None, None, False, None, None, None, None, None, None, None, None, None,
                        qv, o, same, call)
    if keys == 0:  # nobody sees a key
        _fill_unseen(out, rows_lse, call.options.get("sinks"))
    elif seqs * queries:
        options = {"k": joined(k), "v": joined(v), **call.options}
        if call.context.on_host:
            step = _oneshot.kept.steps.find(("fixed", seqs, queries, o.causal), lambda: _oneshot.HostStep(
                np.arange(seqs + 1, dtype=np.int32) * queries, np.full(seqs, queries, np.int32), None, o.causal))
            _oneshot.host_forward(call.at, step, joined(q), out, rows_lse, **options)
        else:
            starts = count(q, seqs + 1) * queries
            _device.forward(call.at, joined(q), out, lse, seqs, seqs * queries, queries, queries,
                            lambda: (starts, starts.new_full((seqs,), queries), None), (), same, causal=o.causal,
                            **options)
    return out, by_sequence(lse, seqs)


# ---- with a cache ----


def _kvcache(q: Any, k_cache: Any, v_cache: Any, k: Optional[Any], v: Optional[Any], cos: Optional[Any],
             sin: Optional[Any], interleaved: bool, lens: Optional[Any], len_number: Optional[int],
             batch_idx: Optional[Any], block_table: Optional[Any], leftpad: Optional[Any], cu_q: Optional[Any],
             cu_new: Optional[Any], max_q: Optional[int], rotary_lens: Optional[Any], qv: Optional[Any],
             o: _Options, same: Any = None, call: Any = None) -> tuple:
    paged = _is_table(block_table)
    rank, dims = (4, "seqs, queries, heads, size") if cu_q is None else (3, "total_q, heads, size")
    call = call or _Call(q, k_cache, v_cache, rank, dims, 4, "num_blocks, page_size, kv_heads, size" if paged else
                         "cache_seqs, max_len, kv_heads, size", qv, True)
    seqs, queries = call.q.shape[0], call.q.shape[-3]
    new = 0 if k is None else k.shape[-3]
    lens = len_number if lens is None else lens
    if k is not None and k.ndim != (4 if cu_new is None else 3):
        raise ArgumentError(f"k has shape {tuple(k.shape)}; it must have 4 dims, or 3 with cu_seqlens_k_new")
    if lens is None and new:
        raise ArgumentError("cache_seqlens is missing; with k and v it says where they go")
    if paged and batch_idx is not None:
        raise UnsupportedError("cache_batch_idx is not supported with block_table: reorder the table's rows")
    if cos is not None and k is None:
        raise ArgumentError("rotary_cos is given without k and v, which it turns")
    turns = o.causal or o.left >= 0 or o.right >= 0  # else rotary has all rows of q at one position
    in_steps = (cu_q is not None or leftpad is not None or (k is not None and (cu_new is not None or new != queries))
                or (cos is not None and (rotary_lens is not None or qv is not None or (queries > 1 and not turns))))
    out, lse, rows_lse = call.prepare(o, q, len(cu_q) - 1 if cu_q is not None else seqs, 0 if in_steps else seqs,
                                      queries)
    if in_steps or call.each:
        turn = None if cos is None else (cos, sin, interleaved, rotary_lens, int(turns))
        return _kvcache_in_steps(call, q, k_cache, v_cache, k, v, turn, lens, batch_idx, block_table, leftpad, cu_q,
                                 cu_new, max_q, qv, o)
    if seqs * queries:
        if cos is not None:
            call.options["rotary"] = _rotary(call, cos, sin, interleaved, lens, new)
        if block_table is not None:
            cache, width = _paged(call), block_table.shape[1]
        else:
            cache, width = _oneshot.cache_rows(call.context, call.k, call.v, call.latent)
        if qv is not None:
            q, k, v = _beside(qv, q), None if k is None else _beside(v, k), None
        if new:
            call.options["k"], call.options["v"] = joined(k), None if v is None else joined(v)
        capacity = width * cache.block_size
        if call.context.on_host:
            where = call.k.shape[0], cache.block_size, width, lens, batch_idx, block_table, seqs
            key = ("kvcache", seqs, queries, new, call.k.shape[0], width, cache.block_size, o.causal,
                   _oneshot.contents(lens, "cache_seqlens"), _oneshot.contents(batch_idx, "cache_batch_idx"),
                   _oneshot.contents(block_table, "block_table"))
            step = _oneshot.kept.steps.find(key, _kvcache_step, (where, queries, new, capacity, o.causal))
            _oneshot.host_forward(call.at, step, joined(q), out, rows_lse, cache=cache, **call.options)
        else:
            like = q.new_empty(0)  # on the same device: `arrays` is kept, and q is not to be
            arrays = partial(_kvcache_arrays, like, call.k.shape[0], cache.block_size, width, seqs, queries, new)
            _device.forward(call.at, joined(q), out, lse, seqs, seqs * queries, queries, capacity, arrays,
                            (lens, None, batch_idx, block_table), same, causal=o.causal, more=queries > capacity,
                            cache=cache, **call.options)
    return out, by_sequence(lse, seqs)


def _rotary(call: _Call, cos: Any, sin: Any, interleaved: bool, lens: Any, rows: int) -> Rotary:
    """The tables as a Rotary, made anew if they were written to. In host memory the rows that this call reads are
    compared; on a GPU torch counts the writes, but not those to tensors of inference_mode()."""
    a, b = array(cos), array(sin)
    if len(a.shape) != 2 or tuple(a.shape) != tuple(b.shape):
        raise ArgumentError(f"rotary_cos has shape {tuple(a.shape)}, rotary_sin {tuple(b.shape)}; both must be "
                            "[positions, rotary_size / 2]")
    key = (call.context, a.data, b.data, tuple(a.shape), a.strides, a.dtype, interleaved, _writes(cos), _writes(sin))

    def build() -> tuple:
        tables = [np.array(x.float().cpu() if is_torch(x) else x, np.float32) for x in (cos, sin)]
        made = Rotary(call.context, num_dims=2 * a.shape[1], num_positions=a.shape[0], cos=tables[0], sin=tables[1],
                      pairing="pairs" if interleaved else "halves")
        return made, tables, cos, sin  # which keeps the addresses from being used again

    made, tables, *_ = _oneshot.kept.rotaries.find(key, build)
    if call.context.on_host:
        at = np.reshape(np.asarray(lens), (-1, 1)) + np.arange(rows)
        at = at[(at >= 0) & (at < a.shape[0])]
        now = [np.asarray(x[at].float() if is_torch(x) else x[at], np.float32) for x in (cos, sin)]
        if not all(np.array_equal(x, table[at]) for x, table in zip(now, tables)):
            del _oneshot.kept.rotaries[key]
            made = _oneshot.kept.rotaries.find(key, build)[0]
    return made


def _writes(x: Any) -> Optional[int]:
    """How often a tensor was written to, where torch counts it."""
    return x._version if is_torch(x) and not x.is_inference() else None


def _kvcache_step(where: tuple, queries: int, new: int, capacity: int, causal: bool) -> _oneshot.HostStep:
    before, tables = _in_cache(np, *where)
    starts = np.arange(len(tables) + 1, dtype=np.int32) * queries
    return _oneshot.HostStep(starts, _room(before, new, len(tables), capacity), tables, causal)


def _kvcache_arrays(like: Any, rows: int, block_size: int, width: int, seqs: int, queries: int, new: int,
                    lens: Any = None, number: Any = None, batch_idx: Any = None, table: Any = None, *_: Any) -> tuple:
    before, tables = _in_cache(like, rows, block_size, width, number if lens is None else lens, batch_idx, table, seqs)
    starts = count(like, seqs + 1) * queries if queries > 1 else None
    return starts, before + new if new else before, tables


def _in_cache(like: Any, rows: int, block_size: int, width: int, lens: Any, batch_idx: Any, block_table: Any,
              seqs: int) -> tuple:
    """(tokens in the cache [seqs], block tables [seqs, blocks]). A row of a cache without tables is `width` blocks.
    like: np, or a tensor on a GPU."""
    host = like is np
    if lens is None or isinstance(lens, int):
        value = width * block_size if lens is None else lens
        before = np.full(seqs, value, np.int32) if host else like.new_full((seqs,), value, dtype=_torch().int32)
    else:
        before = required_array(lens, np.int32, "cache_seqlens") if host else lens
    if block_table is not None:
        return before, table_array(block_table, "block_table", seqs) if host else block_table
    index = count(like, seqs) if batch_idx is None else batch_idx
    index = required_array(index, np.int32, "cache_batch_idx") if host else index.int()
    if host and (index.shape != (seqs,) or (index < 0).any() or (index >= rows).any()):
        raise ArgumentError(f"cache_batch_idx must have {seqs} entries in [0, {rows}), the rows of the cache, one for "
                            "each sequence of q")
    return before, index[:, None] * width + count(like, width)


def _room(before: np.ndarray, new: Any, seqs: int, capacity: int) -> np.ndarray:
    """The tokens of each sequence after k and v were stored, once they are seen to have room."""
    if before.shape != (seqs,) or np.shape(new) not in ((), (seqs,)):
        raise ArgumentError(f"cache_seqlens has shape {before.shape}, new tokens {np.shape(new)}, not ({seqs},)")
    total = before + new
    wrong = (before < 0) | (total > capacity)
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise ArgumentError(f"cache_seqlens[{bad}] = {before[bad]}, with {total[bad] - before[bad]} new tokens, is "
                            f"outside [0, {capacity}], the room of its row")
    return total


def _kvcache_in_steps(call: _Call, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, turn: Optional[tuple], lens: Any,
                      batch_idx: Any, block_table: Any, leftpad: Any, cu_q: Any, cu_new: Any, max_q: Optional[int],
                      qv: Any, o: _Options) -> tuple:
    """What one call of the library does not do: turns q and k, stores k and v, then attends over pages, which begin
    where each sequence does. Index arrays are NumPy's on the host, torch's on a GPU."""
    host, page, uniform, like = call.context.on_host, call.k.shape[1], cu_q is None, np if call.context.on_host else q
    seqs, queries = (q.shape[0], q.shape[1]) if uniform else (len(cu_q) - 1, max_q)

    def starts_of(value: Any, name: str, x: Any) -> Any:  # x is [seqs, rows, ...] without a value
        if value is None:
            return count(like, seqs + 1) * x.shape[1]
        return _starts(value, name, x.shape[0]) if host else value

    starts = starts_of(cu_q, "cu_seqlens_q", q)
    before, tables = _in_cache(like, call.k.shape[0], page, 1, lens, batch_idx, block_table, seqs)
    k_starts = starts * 0 if k is None else starts_of(cu_new, "cu_seqlens_k_new", k)
    new = k_starts[1:] - k_starts[:-1]
    total = _room(before, new, seqs, tables.shape[1] * page) if host else before + new
    skip = count(like, seqs) * 0 if leftpad is None else leftpad
    skip = required_array(skip, np.int32, "cache_leftpad") if host else skip
    if host and (skip.shape != (seqs,) or (skip < 0).any() or (skip > before).any()):
        raise ArgumentError(f"cache_leftpad must have {seqs} entries, each from 0 to the sequence's cache_seqlens")
    q, k, v, qv = (x if x is None or x.ndim == 3 else x.reshape(-1, *x.shape[2:]) for x in (q, k, v, qv))
    if k is not None:
        if host:
            k, v = k[:k_starts[-1]], v[:k_starts[-1]]
        seq, place = places(k_starts, before, k.shape[0])
        if turn is not None:
            cos, sin, interleaved, first, step = turn
            first = before if first is None else required_array(first, np.int32, "rotary_seqlens") if host else first
            at = places(starts, first, q.shape[0], step)[1], places(k_starts, first, k.shape[0])[1]
            last = max(x.max(initial=0) for x in at) if host else 0
            if last >= cos.shape[0]:
                raise ArgumentError(f"rotary_cos has {cos.shape[0]} positions, but a row is at position {last}")
            q, k = rotate(q, cos, sin, at[0], interleaved), rotate(k, cos, sin, at[1], interleaved)
        blocks = tables[seq, place // page]
        if host and ((blocks < 0) | (blocks >= call.k.shape[0])).any():
            raise ArgumentError(f"a new token is in block {blocks.min()} or {blocks.max()}, outside "
                                f"[0, {call.k.shape[0]}), those of the cache")
        for rows, cache, scales in ((k, k_cache, o.k_scales), (v, v_cache, o.k_scales if call.latent else o.v_scales)):
            if call.k.dtype.startswith("float8"):
                if scales is not None:
                    rows = rows / (scales if scales.ndim == 1 else scales[seq])[..., None]
                rows = rows.clip(-_MAX[call.k.dtype], _MAX[call.k.dtype])
            cache[blocks, place % page] = rows.to(cache.dtype) if is_torch(rows) else rows
    size = _oneshot.block_of(page if leftpad is None else math.gcd(page, int(np.gcd.reduce(skip))) if host else 1)
    if size < page or leftpad is not None:  # blocks are cut into parts; tables begin behind those that are skipped
        parts, width = page // size, page // size * tables.shape[1]
        fine = (tables[:, :, None] * parts + count(tables, parts)).reshape(seqs, width).clip(min=-1)
        own = (count(tables, width) + (skip // size)[:, None]).clip(max=width - 1)
        tables = fine[count(tables, seqs)[:, None], own]
        k_cache, v_cache = (x.reshape(-1, size, *x.shape[2:]) for x in (k_cache, v_cache))
    out, lse = _varlen(q, k_cache, v_cache, starts, None, queries, None, tables, total - skip, qv, o)
    return (out.reshape(seqs, queries, *out.shape[1:]), by_sequence(lse, seqs)) if uniform else (out, lse)


# ---- operators, for torch.compile ----


def _define() -> None:
    import torch

    from ..torch import define

    names = {Any: "Tensor", Optional[Any]: "Tensor?", Optional[int]: "SymInt?", Optional[float]: "float?", bool: "bool",
             int: "int", float: "float"}
    written = {"k_cache": "(a!)", "v_cache": "(b!)"}
    options = get_type_hints(_Options)
    num_options = len(options)

    def schema(function: Callable) -> str:
        others = ("o", "out", "same", "call", "return")
        given = {n: kind for n, kind in get_type_hints(function).items() if n not in others}
        return ", ".join(f"{names[kind]}{written.get(name, '')} {name}" for name, kind in (given | options).items())

    def operator(name: str, function: Callable) -> Callable:
        def run(*given: Any, out: tuple = ()) -> tuple:
            result, lse = _eager(name, function, given[:-num_options], given[-num_options:], *out)
            return result, given[0].new_empty((0,), dtype=torch.float32) if lse is None else lse
        return run

    def fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
        out, (*seqs, rows, heads, _) = q.new_empty((*q.shape[:-1], v.shape[-1])), q.shape
        if not rest[-1]:
            return out, q.new_empty((0,), dtype=torch.float32)
        lse = q.new_empty((heads, *seqs, rows), dtype=torch.float32)
        return out, lse.transpose(0, 1) if seqs else lse

    for name, function in (("flash_attn_varlen", _varlen), ("flash_attn", _fixed), ("flash_attn_kvcache", _kvcache)):
        define(f"{name}({schema(function)}) -> (Tensor, Tensor)", operator(name, function), fake)
    varlen = operator("flash_attn_varlen", _varlen)
    define(f"flash_attn_varlen_out({schema(_varlen)}, Tensor(a!) out) -> Tensor",
           lambda *given: varlen(*given[:-1], out=given[-1:])[1], lambda *given: fake(*given[:-1])[1])


try:
    _define()
except ImportError:  # without torch: NumPy arrays only
    pass
