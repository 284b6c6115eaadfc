"""The attention of FlashInfer, with its arguments and its meaning, on CPUs and GPUs, for torch tensors.

    from folio.flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    from folio.flashinfer import append_paged_kv_cache, merge_state, single_prefill_with_kv_cache

A paged KV cache is one tensor [pages, 2, ...] or a pair (k, v), in layout "NHD" [pages, page_size, kv_heads, size] or
"HND" [pages, kv_heads, page_size, size]. The lse of every function here is to the base 2, as in FlashInfer; elsewhere
in Folio it is natural. A row that sees no key gets zeros, and -inf in lse. docs/python.md lists what is here.

plan() reads its arrays on the host; if they lie on a GPU it waits for them, as FlashInfer's does. With
use_cuda_graph=True the number of sequences, and of rows, stays that of the first plan(). A later plan() is seen by
replays on the same stream. There is no workspace to pass: float_workspace_buffer may be None.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch

from . import _abi as abi
from . import _oneshot
from ._arrays import array, dtype_of, numpy_dtype, starts_check
from ._run import refuse_gradients
from .attention import Geometry, alibi_slopes
from .cache import KVCache
from .context import default_context
from .errors import ArgumentError, UnsupportedError
from .flash_attn.layers.rotary import rotate
from .functional import merge_states as _merge
from .plan import Plan, attention_forward, options, run_layer
from .torch import define, find, register

__all__ = ["BatchAttentionWithAttentionSinkWrapper", "BatchDecodeWithPagedKVCacheWrapper",
           "BatchMLAPagedAttentionWrapper", "BatchPrefillWithPagedKVCacheWrapper",
           "BatchPrefillWithRaggedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper", "append_paged_kv_cache",
           "fast_decode_plan", "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_state_in_place",
           "merge_states", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
           "single_prefill_with_kv_cache_return_lse"]

_LOG2E = math.log2(math.e)


def _host(value: Any, name: str, size: Optional[int] = None) -> np.ndarray:
    """An index array as int32 on the host; waits for a GPU."""
    a = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if a.ndim != 1 or not np.issubdtype(a.dtype, np.integer) or (size is not None and a.size != size):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {a.shape}; it must be int32 "
                            f"[{'n' if size is None else size}]")
    return np.ascontiguousarray(a, np.int32)


def _indptr(value: Any, name: str) -> np.ndarray:
    return starts_check(_host(value, name), name)


def _unpack(cache: Union[torch.Tensor, tuple], layout: str) -> tuple:
    """(k, v), each [pages, ...]."""
    if layout not in ("NHD", "HND"):
        raise ArgumentError(f'kv_layout is {layout!r}; it must be "NHD" or "HND"')
    if isinstance(cache, (tuple, list)):
        k, v = cache
    elif cache.dim() == 5 and cache.shape[1] == 2:
        k, v = cache[:, 0], cache[:, 1]
    else:
        raise ArgumentError(f"the paged KV cache has shape {tuple(cache.shape)}; it must be [pages, 2, ...] with 5 "
                            "dims, or a pair (k, v)")
    _need_dims(4, ("k of the paged KV cache", k), ("v of the paged KV cache", v))
    return k, v


def _need_dims(dims: int, *given: tuple) -> None:
    for name, x in given:
        if x.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it must have {dims} dims")


def _wrap(context: Any, k: torch.Tensor, v: torch.Tensor, layout: str) -> KVCache:
    hnd = layout == "HND"

    def strides(x: torch.Tensor) -> tuple:
        page, a, b, _ = x.stride()
        return (page, b, a) if hnd else (page, a, b)

    heads, page_size = (k.shape[1], k.shape[2]) if hnd else (k.shape[2], k.shape[1])
    return _oneshot.wrap(context, array(k), array(v), k.shape[0], page_size, heads, strides(k), strides(v))


class _Options(NamedTuple):
    """What plan() of every wrapper takes besides sequences and dims; FlashInfer's names."""

    causal: bool = False
    custom_mask: Any = None
    packed_custom_mask: Any = None
    pos_encoding_mode: str = "NONE"
    sm_scale: Optional[float] = None
    window_left: int = -1
    logits_soft_cap: Optional[float] = None
    rope_scale: Optional[float] = None
    rope_theta: Optional[float] = None
    q_data_type: Any = "float16"
    kv_data_type: Any = None
    v_in_k: bool = False


# arguments of plan(), and of constructors: what is no option changes nothing here
_KNOWN = {*_Options._fields, "o_data_type", "backend", "block_tables", "disable_split_kv", "fixed_split_size",
          "head_dim_qk", "head_dim_vo", "jit_kwargs", "max_sequence_kv", "max_token_per_sequence", "non_blocking",
          "seq_lens", "seq_lens_q", "use_fp16_qk_reduction", "use_tensor_cores"}
_name = functools.cache(lambda dtype: numpy_dtype(dtype_of(dtype)).name)


def _options(given: dict) -> _Options:
    o = _Options(**{name: value for name, value in given.items() if name in _Options._fields})
    q_name = _name("float16" if o.q_data_type is None else o.q_data_type)
    if given.get("o_data_type") is not None and _name(given["o_data_type"]) != q_name:
        raise UnsupportedError(f"o_data_type is {_name(given['o_data_type'])}; out has the dtype of q, {q_name}")
    for name in given.keys() - _KNOWN:
        if given[name] is not None and not (isinstance(given[name], int) and given[name] == 0):
            raise UnsupportedError(f"plan() does not support {name}; it supports {', '.join(_Options._fields[:-1])}")
    if o.pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise ArgumentError(f"pos_encoding_mode is {o.pos_encoding_mode!r}; it must be NONE, ROPE_LLAMA or ALIBI")
    return o._replace(q_data_type=q_name, kv_data_type=q_name if o.kv_data_type is None else _name(o.kv_data_type))


def _rotate(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """x [..., heads, size] at positions [...], rotated as in Llama: pairs i and i + size / 2."""
    half = x.shape[-1] // 2
    pairs = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions[..., None].double() * (theta ** -pairs / scale)
    return rotate(x, angles.cos(), angles.sin(), ..., False)


def _mask(o: _Options, rows: np.ndarray, lens: np.ndarray) -> tuple:
    """(which sequences are causal [seqs], bias or None) of a custom mask: rows times keys of each sequence, one after
    another; the bits of each begin at a byte in a packed one. Masks that are full or causal need no bias."""
    packed = o.packed_custom_mask is not None
    given = torch.as_tensor(o.packed_custom_mask if packed else o.custom_mask).detach().cpu().reshape(-1).numpy()
    bits = np.unpackbits(given.astype(np.uint8), bitorder="little") if packed else given
    counts, unit = np.diff(rows).astype(np.int64), 8 if packed else 1
    ends = np.cumsum(-(-counts * lens // unit) * unit)
    if bits.size != ends.max(initial=0):
        raise ArgumentError(f"the custom mask has {bits.size} entries; it must have {ends.max(initial=0)}, rows times "
                            f"keys of each sequence{' in whole bytes' if packed else ''}")
    masks = [part[:r * c].reshape(r, c) != 0 for part, r, c in zip(np.split(bits, ends), counts, lens)]
    causal = np.array([np.array_equal(m, np.tri(r, c, c - r)) for m, r, c in zip(masks, counts, lens)], bool)
    if all(c or m.all() for c, m in zip(causal, masks)):
        return causal, None
    bias = torch.full((len(masks), 1, max(counts), max(lens)), -math.inf, dtype=torch.bfloat16)
    for one, m in zip(bias, masks):
        one[0, :m.shape[0], :m.shape[1]].masked_fill_(torch.from_numpy(m), 0)
    return np.zeros_like(causal), bias


def _pages(indptr: Any, indices: Any) -> tuple:
    pages, blocks = _indptr(indptr, "paged_kv_indptr"), _host(indices, "paged_kv_indices")
    if pages[-1] > blocks.size:
        raise ArgumentError(f"paged_kv_indptr ends at {pages[-1]}, but paged_kv_indices has {blocks.size} entries")
    return pages, blocks


def _tokens(pages: np.ndarray, last: Any, page_size: int) -> np.ndarray:
    """Keys of each sequence from the tokens in its last page."""
    ends, counts = _host(last, "paged_kv_last_page_len", pages.size - 1), np.diff(pages)
    wrong = (counts > 0) & ((ends < 1) | (ends > page_size))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ArgumentError(f"paged_kv_last_page_len[{i}] = {ends[i]} is outside [1, {page_size}]")
    return np.where(counts > 0, (counts - 1) * page_size + ends, 0).astype(np.int32)


def _taken(pages: torch.Tensor, *caches: torch.Tensor) -> list:
    """A copy of these pages of each cache."""
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < len(caches[0]):
        raise ArgumentError(f"paged_kv_indices must be in [0, {len(caches[0])}), the pages of the cache")
    return [x[pages.long()] for x in caches]


class _Wrapper:
    """One step's plan over paged caches; run() serves every layer."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 *buffers: Any, **named: Any) -> None:
        """As in FlashInfer. Buffers are not needed, but the one of the page indices has the room of a graph's step."""
        if kv_layout not in ("NHD", "HND"):
            raise ArgumentError(f'kv_layout is {kv_layout!r}; it must be "NHD" or "HND"')
        if named.pop("jit_args", None) is not None:
            raise UnsupportedError("jit_args is not supported: there are no kernels to compile at run time")
        room = (*buffers, None, None, None)[2]
        for name, value in named.items():
            if name in ("paged_kv_indices_buffer", "paged_kv_indices_buf"):
                room = value
            elif name not in _KNOWN and not name.endswith(("_buf", "_buffer")):
                raise TypeError(f"{type(self).__name__}() has no argument {name!r}")
        self._layout, self._graph = kv_layout, use_cuda_graph
        self._room = len(room) if room is not None else 0  # pages of a graph's step
        self._planned: Optional[_oneshot.Planned] = None
        self._made_for: Any = None
        self._geometry: Any = None
        self._key = register(self)

    def _set(self, o: _Options, rows: np.ndarray, pages: np.ndarray, blocks: np.ndarray, lens: np.ndarray, heads: int,
             kv_heads: int, size: int, v_size: int, page_size: int) -> None:
        """A step. rows, pages [seqs + 1]: where those of each sequence begin. page_size 0: k and v have the rows of q,
        and there is no cache."""
        if rows.size != lens.size + 1:
            raise ArgumentError(f"qo_indptr has {rows.size} entries, but there are {lens.size} sequences of keys")
        causal, bias = bool(o.causal), None
        if o.custom_mask is not None or o.packed_custom_mask is not None:
            causal, bias = _mask(o, rows, lens)
        more, self._extra = _oneshot.positions(rows, lens), None  # further arrays of the batch, and what few steps need
        if bias is not None or o.pos_encoding_mode != "NONE":
            self._extra, positions = self._extras(o, heads, rows, pages, blocks, lens, page_size, causal)
            self._extra["bias"], more = bias, more | positions
            if "pages" in self._extra:
                blocks = np.arange(pages[-1], dtype=np.int32)
        if causal is not True and not np.all(causal):
            which = np.where(causal, abi.FOLIO_CAUSAL_YES, abi.FOLIO_CAUSAL_NO)
            more["causality"] = np.full(lens.size, which, np.int32)
        self._rows, self._page_size = int(rows[-1]), page_size
        self._same = {"window_left": o.window_left, "q_len_per_req": self._rows // max(lens.size, 1)}
        geometry = Geometry(heads, kv_heads, size, v_size, o.q_data_type, o.kv_data_type, o.sm_scale or size ** -0.5,
                            (max(o.window_left, -1), -1), float(o.logits_soft_cap or 0.0), o.v_in_k)
        self._step = _oneshot.CsrStep(rows, lens, pages if page_size else None, blocks, more)
        self._geometry = geometry
        if self._planned is not None and self._made_for[:2] == (geometry, page_size):
            context, num_blocks = self._made_for[2:4]
            # here and not in run(), which a replayed graph does not call; run() if it may bring a larger cache
            if (self._graph and not context.on_host) or blocks.max(initial=0) < num_blocks:
                self._planned.update(self._step)

    def _extras(self, o: _Options, heads: int, rows: np.ndarray, pages: np.ndarray, blocks: np.ndarray,
                lens: np.ndarray, page_size: int, causal: Any) -> tuple:
        """(what a step with pos_encoding_mode needs, positions of the batch). ALIBI: slopes, and shift [rows, 1], by
        which times the slope lse grows. ROPE_LLAMA: turn (scale, theta), q_at and k_at (positions), pages (which to
        copy, one after another)."""
        counts = np.diff(rows)
        first = (lens - counts).astype(np.int64)
        if o.pos_encoding_mode == "ALIBI":
            # a key's score grows with its place, also behind the row: rows that are not causal stand behind all keys
            first = np.where(causal | (counts <= 1), first, lens)
            if o.logits_soft_cap or (o.window_left >= 0 and (first + counts > lens).any()):
                raise UnsupportedError("pos_encoding_mode 'ALIBI' is supported without logits_soft_cap, and with "
                                       "window_left only if causal")
            return ({"slopes": torch.from_numpy(alibi_slopes(heads)),
                     "shift": torch.from_numpy(np.repeat(first, counts)[:, None])},
                    {"first_query_pos": first, "first_key_pos": np.zeros_like(first)})
        if o.pos_encoding_mode == "NONE" or not lens.any():
            return {}, {}
        if "8" in o.kv_data_type:  # float8_e4m3fn, int8
            raise UnsupportedError("pos_encoding_mode 'ROPE_LLAMA' is not supported with 8-bit caches: rotate k before "
                                   "it is stored, and q, and use 'NONE'")
        used, page = blocks[:pages[-1]], max(page_size, 1)
        place = np.arange(used.size) - np.repeat(pages[:-1], np.diff(pages))
        return {"turn": (float(o.rope_scale or 1.0), float(o.rope_theta or 1e4)), "pages": torch.from_numpy(used),
                "q_at": torch.from_numpy(np.arange(rows[-1]) + np.repeat(first - rows[:-1], counts)),
                "k_at": torch.from_numpy(place[:, None] * page + np.arange(page))}, {}

    def _ready(self, context: Any, num_blocks: int, scale: float) -> Plan:
        """The plan, made anew if caches or geometry need another one. It grows, unless it is for graphs."""
        made_for = (self._geometry, self._page_size, context, num_blocks, scale)
        if self._planned is None or self._made_for != made_for:
            limits: dict[str, Any] = {}
            if self._graph and not context.on_host:
                if self._planned is not None and self._made_for[4] != scale:
                    raise UnsupportedError("with use_cuda_graph all layers must have the same q_scale times k_scale")
                lens, rows = self._step.seq_lens, max(self._rows, 1)
                seqs, longest = max(lens.size, 1), max(int(lens.max(initial=1)), self._room * self._page_size, 1)
                limits = {"max_seqs": seqs, "max_query_tokens": rows, "max_seq_len": longest,
                          "max_query_len": int(rows == seqs), "graph": True}
            geometry = self._geometry._replace(scale=scale) if scale else self._geometry
            self._planned = _oneshot.Planned(_oneshot.attention(context, geometry), block_size=self._page_size,
                                             num_blocks=num_blocks, **limits)
            self._made_for = made_for
        if self._planned.step is not self._step:
            self._planned.update(self._step)
        return self._planned.plan

    def _cache(self, context: Any, k: torch.Tensor, v: torch.Tensor) -> Optional[KVCache]:
        return _wrap(context, k, v, self._layout)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, k_scale: float, v_scale: float,
             sinks: Any, want_lse: bool, out: Any = None, lse: Any = None) -> tuple:
        """scale: of the scores; 0: that of plan()."""
        context = default_context(array(q).device)
        extra = self._extra
        if extra is not None:
            q, k, v = self._apply(extra, context, q, k, v, sinks)
        cache = self._cache(context, k, v)
        plan = self._ready(context, 0 if cache is None else cache.num_blocks, scale)
        if cache is not None and cache.block_size != self._page_size:
            raise ArgumentError(f"the cache has pages of {cache.block_size} tokens, but page_size of plan() was "
                                f"{self._page_size}")
        at = plan.attentions[0]
        tail, after = b"", 0.0
        if sinks is not None or k_scale or v_scale or extra is not None:
            if v_scale and k.element_size() > 1:
                after, v_scale = v_scale, 0.0
            slopes, bias = (None, None) if extra is None else (extra.get("slopes"), extra["bias"])
            tail, keep = options(context, at, slopes, sinks, bias, k_scale, v_scale)
        new_k, new_v = (k, v) if cache is None else (None, None)
        try:
            result = run_layer(attention_forward, (plan._as_parameter_, 0, abi.FOLIO_ATTENTION_DECODER), context, at, q,
                               new_k, new_v, cache, 0, out, lse if lse is not None else want_lse, tail)
        except ArgumentError:
            for name, x, argument, planned in (("q", q, "q_data_type", self._geometry.dtype),
                                               ("the paged KV cache", k, "kv_data_type", self._geometry.kv_dtype)):
                found = str(x.dtype).rpartition(".")[2]
                if found != planned:
                    raise ArgumentError(f"{name} has dtype {found}, but {argument} of plan() was {planned}; its "
                                        "default is float16")
            raise
        if after:
            (result[0] if want_lse else result).mul_(after)
        if not want_lse:
            return result, None
        if extra is not None and "shift" in extra:
            result[1].add_(extra["slopes"] * extra["shift"])
        return result[0], result[1].mul_(_LOG2E)

    def _apply(self, extra: dict, context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               sinks: Any) -> tuple:
        """(q, k, v), rotated if the step says so; k is then a copy of its pages."""
        if self._graph and not context.on_host:
            raise UnsupportedError("use_cuda_graph is supported with masks that are causal or full, and with "
                                   "pos_encoding_mode 'NONE'")
        if sinks is not None and "slopes" in extra:
            raise UnsupportedError("sinks are not supported with pos_encoding_mode 'ALIBI'")
        for name, x in extra.items():
            if isinstance(x, torch.Tensor):
                extra[name] = x.to(q.device)
        if "turn" not in extra:
            return q, k, v
        q, at = _rotate(q, extra["q_at"], *extra["turn"]), extra["k_at"]
        if k.dim() == 3:  # without pages
            return q, _rotate(k[:at.numel()], at.reshape(-1), *extra["turn"]), v
        k, v = _taken(extra["pages"], k, v)
        if self._layout == "HND":
            return q, _rotate(k.transpose(1, 2), at, *extra["turn"]).transpose(1, 2), v
        return q, _rotate(k, at, *extra["turn"]), v

    def _split(self, cache: Any) -> tuple:
        """(k, v) of what run() was given."""
        return _unpack(cache, self._layout)

    def run(self, q: torch.Tensor, paged_kv_cache: Union[torch.Tensor, tuple], *, q_scale: Optional[float] = None,
            k_scale: Optional[float] = None, v_scale: Optional[float] = None, out: Optional[torch.Tensor] = None,
            lse: Optional[torch.Tensor] = None, return_lse: bool = False, sinks: Optional[torch.Tensor] = None,
            **unused: Any) -> Any:
        """One layer. q [rows, heads, size]. Returns out, or (out, lse [rows, heads] to the base 2). On 16-bit
        caches a k_scale that is not the last layer's makes a new plan; so does a q_scale on all."""
        if self._geometry is None:
            raise ArgumentError("plan() must be called before run()")
        for name, value in unused.items():
            if name != "enable_pdl" and value is not None and value != self._same.get(name):
                raise UnsupportedError(f"run() does not support {name}={value!r}, only options of plan() as they are "
                                       "there")
        k, v = self._split(paged_kv_cache)
        if torch.is_grad_enabled():
            refuse_gradients(q, k, v)
        scales = (0.0, 0.0, 0.0)
        if q_scale is not None or k_scale is not None or v_scale is not None:
            scales = self._scales(k, q_scale, k_scale, v_scale)
        if torch.compiler.is_compiling() and out is None and lse is None:
            result, state = torch.ops.folio.flashinfer_run(q, k, v, *scales, sinks, self._key, return_lse)
        else:
            result, state = self._run(q, k, v, *scales, sinks, return_lse or lse is not None, out, lse)
        return (result, state) if return_lse else result

    def _scales(self, k: torch.Tensor, q_scale: Any, k_scale: Any, v_scale: Any) -> tuple:
        """(scale of the scores or 0, k_scale and v_scale or 0). The library has the last two for 8-bit caches: on
        others k_scale goes into the scores."""
        given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UnsupportedError(f"{name} has shape {tuple(value.shape)}; it must be one number for all heads")
        factor, on_k, on_v = (1.0 if value is None else float(value) for value in given.values())
        if k.element_size() > 1:
            factor, on_k = factor * on_k, 1.0
        scale = self._geometry.scale * factor if factor != 1.0 else 0.0
        return scale, *(x if x != 1.0 else 0.0 for x in (on_k, on_v))

    def run_return_lse(self, *arguments: Any, **options: Any) -> tuple:
        return self.run(*arguments, return_lse=True, **options)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.run(*arguments, **options)

    forward_return_lse = run_return_lse

    def end_forward(self) -> None:
        """Nothing to do; older versions of FlashInfer have it."""


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query row for each sequence, or q_len_per_req."""

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
             page_size: int, *, q_len_per_req: int = 1, data_type: Any = None, **options: Any) -> None:
        """The step's sequences: pages indices[indptr[i] : indptr[i + 1]], last_page_len[i] tokens in the last one.
        Options: those of _Options; data_type is for dtypes that are None."""
        options = {"causal": True, "q_data_type": "float16", "kv_data_type": None} | options
        options |= {name: data_type for name in ("q_data_type", "kv_data_type") if options[name] is None}
        pages, blocks = _pages(indptr, indices)
        self._set(_options(options), np.arange(pages.size, dtype=np.int32) * q_len_per_req, pages, blocks,
                  _tokens(pages, last_page_len, page_size), num_qo_heads, num_kv_heads, head_dim, head_dim, page_size)

    begin_forward = plan


def fast_decode_plan(self: BatchDecodeWithPagedKVCacheWrapper, indptr: Any, *dims: Any, q_data_type: Any = None,
                     global_override_indptr_cpu: Any = None, **options: Any) -> None:
    """plan() of a decode wrapper, which takes indptr from the host if it is there. May replace self.plan."""
    indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    BatchDecodeWithPagedKVCacheWrapper.plan(self, indptr, *dims, q_data_type=q_data_type, **options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of query rows for each sequence: prompts, chunks, drafts."""

    def plan(self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Optional[int] = None,
             **options: Any) -> None:
        """The step's sequences: rows qo_indptr[i] to qo_indptr[i + 1] of q, and pages as in decode. Options: those of
        _Options. The causal mask is aligned to the bottom right; a custom mask, of what is seen, replaces it."""
        pages, blocks = _pages(paged_kv_indptr, paged_kv_indices)
        self._set(_options(options), _indptr(qo_indptr, "qo_indptr"), pages, blocks,
                  _tokens(pages, paged_kv_last_page_len, page_size), num_qo_heads, num_kv_heads, head_dim_qk,
                  head_dim_vo or head_dim_qk, page_size)

    begin_forward = plan


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Prefill with sinks, f32 [heads]: one more score in each softmax."""

    def run(self, q: torch.Tensor, paged_kv_cache: Any, sink: Any = None, sm_scale: Optional[float] = None,
            **arguments: Any) -> Any:
        if sm_scale is not None and self._geometry is not None:
            arguments["q_scale"] = sm_scale / self._geometry.scale
        return super().run(q, paged_kv_cache, sinks=sink, **arguments)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Keys without pages: k and v [keys, kv_heads, size], or in layout "HND" [kv_heads, keys, size], one sequence after
    another."""

    def plan(self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
             head_dim_vo: Optional[int] = None, **options: Any) -> None:
        """The step's sequences: rows qo_indptr[i] to qo_indptr[i + 1] of q, kv_indptr[i] to kv_indptr[i + 1] of k and
        v. Options as in BatchPrefillWithPagedKVCacheWrapper."""
        o = _options(options)
        rows, starts = _indptr(qo_indptr, "qo_indptr"), _indptr(kv_indptr, "kv_indptr")
        size = int(self._graph)  # in a graph, every step has the same
        if not size and (not np.array_equal(rows, starts) or "8" in o.kv_data_type):
            size = _oneshot.block_of(int(np.gcd.reduce(starts)))  # pages as large as the lengths of all sequences allow
        page = max(size, 1)
        self._set(o, rows, starts // page, np.arange(starts[-1] // page, dtype=np.int32), np.diff(starts), num_qo_heads,
                  num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, size)

    begin_forward = plan

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:  # type: ignore
        if self._graph:
            self._room = k.shape[self._layout == "HND"]  # keys that later steps may have
        return super().run(q, (k, v), **arguments)

    def _split(self, cache: Any) -> tuple:
        _need_dims(3, ("k", cache[0]), ("v", cache[1]))
        return tuple(x.transpose(0, 1) for x in cache) if self._layout == "HND" else cache

    def _cache(self, context: Any, k: torch.Tensor, v: torch.Tensor) -> Optional[KVCache]:
        if not self._page_size:
            return None
        if not len(k):  # a cache has at least one page, which must stay while the call runs
            k, v = self._copy = tuple(x.new_zeros((self._page_size, *x.shape[1:])) for x in (k, v))
        rows = len(k) - len(k) % self._page_size
        return _wrap(context, *(x[:rows].unflatten(0, (-1, self._page_size)) for x in (k, v)), "NHD")  # type: ignore


def single_prefill_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kv_layout: str = "NHD",
                                 o_dtype: Any = None, return_lse: bool = False, q_scale: Any = None,
                                 k_scale: Any = None, v_scale: Any = None, **options: Any) -> Any:
    """One sequence. q [rows, heads, size], k and v as in BatchPrefillWithRaggedKVCacheWrapper, and its options. Returns
    out, or (out, lse [rows, heads])."""
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        raise TypeError("q, k and v must be torch tensors")
    context = default_context(array(q).device)
    key = ("single", context, None if context.on_host else context.stream(), kv_layout, q.shape[1:], k.shape[-1],
           v.shape[-1], q.dtype, k.dtype)
    wrapper = _oneshot.kept.plans.find(key, BatchPrefillWithRaggedKVCacheWrapper, (None, kv_layout))
    keys, kv_heads = (k.shape[1], k.shape[0]) if kv_layout == "HND" else k.shape[:2]
    wrapper.plan([0, q.shape[0]], [0, keys], q.shape[1], kv_heads, q.shape[2], v.shape[-1],
                 **{"q_data_type": q.dtype, "kv_data_type": k.dtype, "o_data_type": o_dtype} | options)
    return wrapper.run(q, k, v, return_lse=return_lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def single_decode_with_kv_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD",
                                pos_encoding_mode: str = "NONE", use_tensor_cores: bool = False, *,
                                return_lse: bool = False, **options: Any) -> Any:
    """The same for one row: q [heads, size]. Returns out, or (out, lse [heads])."""
    out, lse = single_prefill_with_kv_cache(q[None], k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode,
                                            causal=True, return_lse=True, **options)
    return (out[0], lse[0]) if return_lse else out[0]


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """Latent attention: all heads read one row of head_dim_ckv + head_dim_kpe numbers, and V is its first part."""

    def __init__(self, float_workspace_buffer: Any = None, use_cuda_graph: bool = False, qo_indptr: Any = None,
                 kv_indptr: Any = None, kv_indices: Any = None, kv_len_arr: Any = None, backend: str = "auto") -> None:
        super().__init__(None, "NHD", use_cuda_graph, paged_kv_indices_buf=kv_indices)

    def plan(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
             head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
             use_profiler: bool = False) -> None:
        """The step's sequences: rows and pages as in BatchPrefillWithPagedKVCacheWrapper, kv_len_arr[i] keys."""
        pages, blocks = _pages(kv_indptr, kv_indices)
        lens = _host(kv_len_arr, "kv_len_arr", pages.size - 1)
        o = _options({"causal": causal, "sm_scale": sm_scale, "q_data_type": q_data_type, "kv_data_type": kv_data_type,
                      "v_in_k": True})
        self._set(o, _indptr(qo_indptr, "qo_indptr"), pages, blocks, lens, num_heads, 1, head_dim_ckv + head_dim_kpe,
                  head_dim_ckv, page_size)

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor,  # type: ignore
            kpe_cache: torch.Tensor, out: Any = None, lse: Any = None, return_lse: bool = False,
            profiler_buffer: Any = None, kv_len: Any = None, page_table: Any = None, return_lse_base_on_e: bool = False,
            o_scale: Any = None, *, ckv_scale: Any = None, ckv_scale_arr: Any = None, kpe_scale: Any = None) -> Any:
        """One layer. q_nope [rows, heads, ckv], q_pe [rows, heads, kpe], ckv_cache [pages, page_size, ckv], kpe_cache
        [pages, page_size, kpe]. Caches that are slices of one tensor, ckv first, are read in place. Of others the
        step's pages are copied in each call."""
        if ckv_scale != kpe_scale or ckv_scale_arr is not None or o_scale is not None or (
                ckv_scale is not None and ckv_cache.element_size() > 1):
            raise UnsupportedError("of scales, only a ckv_scale and the same kpe_scale are supported, for 8-bit caches")
        result, state = super().run(torch.cat((q_nope, q_pe), -1), (kpe_cache, ckv_cache), out=out, lse=lse,
                                    k_scale=ckv_scale, return_lse=True)
        if return_lse_base_on_e:
            state = state.mul_(1 / _LOG2E)
        return (result, state) if return_lse else result

    def _split(self, cache: Any) -> tuple:
        _need_dims(3, ("kpe_cache", cache[0]), ("ckv_cache", cache[1]))
        return cache

    def _cache(self, context: Any, k: torch.Tensor, v: torch.Tensor) -> KVCache:
        kpe, ckv, shape = k, v, (*v.shape[:2], k.shape[-1] + v.shape[-1])
        if not kpe.shape[-1] or (kpe.data_ptr() == ckv.data_ptr() + ckv.shape[-1] * ckv.element_size()
                                 and kpe.stride() == ckv.stride() and kpe.shape[:2] == ckv.shape[:2]):
            joined = ckv.as_strided(shape, ckv.stride())
        elif self._graph and not context.on_host:
            raise UnsupportedError("with use_cuda_graph, ckv_cache and kpe_cache must be slices of one tensor")
        else:
            used = torch.from_numpy(self._step.blocks[:self._step.indptr[-1]]).to(ckv.device)
            joined = self._copy = ckv.new_empty(shape)  # which must stay while the call runs
            joined[used.long()] = torch.cat(_taken(used, ckv, kpe), -1)
        a, (page, token, _) = array(joined), joined.stride()
        key = ("latent", context, a.data, a.dtype, shape, page, token, ckv.shape[-1])
        return _oneshot.kept.caches.find(key, lambda: KVCache._strided(
            context, [a], [], (*shape[:2], 1), (page, token, shape[2]), (page, token, shape[2]), ckv.shape[-1], True))


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of keys. Each level cuts the rows into sequences: the first has the keys that most rows
    share, the last has each sequence's own."""

    def __init__(self, num_levels: int, float_workspace_buffer: Any = None, kv_layout: str = "NHD",
                 use_cuda_graph: bool = False, qo_indptr_buf_arr: Any = None, paged_kv_indptr_buf_arr: Any = None,
                 paged_kv_indices_buf_arr: Any = None, paged_kv_last_page_len_buf_arr: Any = None) -> None:
        self._levels = [BatchPrefillWithPagedKVCacheWrapper(None, kv_layout, use_cuda_graph, paged_kv_indices_buf=room)
                        for room in paged_kv_indices_buf_arr or [None] * num_levels]

    def plan(self, qo_indptr_arr: Any, paged_kv_indptr_arr: Any, paged_kv_indices_arr: Any,
             paged_kv_last_page_len: Any, *dims: int, causal: bool = False, **options: Any) -> None:
        """Lists with the arrays of each level, as in BatchPrefillWithPagedKVCacheWrapper. causal: in the last level."""
        if options.get("window_left", -1) >= 0 or options.get("pos_encoding_mode", "NONE") != "NONE":
            raise UnsupportedError("levels are supported without window_left, and with pos_encoding_mode 'NONE': a "
                                   "level does not know the positions of its keys")
        for level, *step in zip(self._levels, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr,
                                paged_kv_last_page_len, strict=True):
            level.plan(*step, *dims, causal=causal and level is self._levels[-1], **options)

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        """One layer. Returns out."""
        return _merged(*zip(*[level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]))[0]


# ---- pages ----


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each sequence, [seqs]."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int) -> tuple:
    """(sequence, position) of each appended row, int32 [nnz] each: the rows are the last tokens of their sequences."""
    row = torch.arange(nnz, dtype=torch.int32, device=append_indptr.device)
    seq = torch.searchsorted(append_indptr, row, right=True, out_int32=True) - 1
    ends = append_indptr[1:].to(torch.int32)
    return seq, seq_lens.to(device=row.device, dtype=torch.int32)[seq] - ends[seq] + row


def append_paged_kv_cache(append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor,
                          positions: torch.Tensor, paged_kv_cache: Union[torch.Tensor, tuple], kv_indices: torch.Tensor,
                          kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, kv_layout: str = "NHD") -> None:
    """Stores rows [rows, kv_heads, size]: row i is token positions[i] of sequence batch_indices[i], whose pages are
    kv_indices[kv_indptr[s] : kv_indptr[s + 1]]."""
    k, v = _unpack(paged_kv_cache, kv_layout)
    call = torch.ops.folio.append_paged_kv_cache if torch.compiler.is_compiling() else _append
    call(append_key, append_value, batch_indices, positions, k, v, kv_indices, kv_indptr, kv_layout == "HND")


def _append(key: torch.Tensor, value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
            k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, hnd: bool) -> None:
    page_size = k.shape[2] if hnd else k.shape[1]
    if not k.is_cpu:
        pages = indices[indptr[batch_indices.long()].long() + positions.long() // page_size].long()
        offsets = positions.long() % page_size
        for rows, target in ((key, k), (value, v)):
            target[(pages, slice(None), offsets) if hnd else (pages, offsets)] = rows.to(target.dtype)
        return
    starts, pages = _indptr(indptr, "kv_indptr"), _host(indices, "kv_indices")
    seqs, places = _host(batch_indices, "batch_indices"), _host(positions, "positions", len(batch_indices))
    if seqs.size == 0:
        return
    if (seqs < 0).any() or (seqs >= starts.size - 1).any():
        raise ArgumentError(f"batch_indices must be in [0, {starts.size - 1}), the sequences of kv_indptr")
    entries = starts[seqs].astype(np.int64) + places // page_size
    wrong = (places < 0) | (entries >= starts[seqs + 1]) | (entries >= pages.size)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ArgumentError(f"positions[{i}] = {places[i]} is outside of the pages of sequence {seqs[i]}")
    slots = pages[entries].astype(np.int64) * page_size + places % page_size
    _wrap(default_context(), k, v, "HND" if hnd else "NHD").write(0, key, value, slots)


# ---- merging; lse to the base 2 ----


def _merged(values: Any, states: Any) -> tuple:
    call = torch.ops.folio.merge_base2 if torch.compiler.is_compiling() else _merge_base2
    return call(list(values), list(states))


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> tuple:
    """(v, s) over both parts of the keys. v [rows, heads, size], s [rows, heads]."""
    return _merged([v_a, v_b], [s_a, s_b])


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor,
                         mask: Optional[torch.Tensor] = None) -> None:
    """The same into v and s, for the rows where mask is True."""
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        merged_v = torch.where(mask[:, None, None], merged_v, v)
        merged_s = torch.where(mask[:, None], merged_s, s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple:
    """(v, s) over all parts. v [rows, parts, heads, size], s [rows, parts, heads]."""
    return _merged(v.unbind(1), s.unbind(1))


def _merge_base2(values: list, states: list) -> tuple:
    out, lse = _merge([(v, s.to(torch.float32) * (1 / _LOG2E)) for v, s in zip(values, states)])
    return out, lse.mul_(_LOG2E)


# ---- operators, for torch.compile ----


def _run_op(q: Any, k: Any, v: Any, scale: float, k_scale: float, v_scale: float, sinks: Any, key: int,
            want_lse: bool) -> tuple:
    out, lse = find(_Wrapper, key)._run(q, k, v, scale, k_scale, v_scale, sinks, want_lse)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


def _run_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
    lse = q.new_empty((q.shape[0], q.shape[1]) if rest[-1] else (0,), dtype=torch.float32)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1])), lse


define("flashinfer_run(Tensor q, Tensor k_cache, Tensor v_cache, float scale, float k_scale, float v_scale, "
       "Tensor? sinks, int key, bool lse) -> (Tensor, Tensor)", _run_op, _run_fake)
define("append_paged_kv_cache(Tensor k, Tensor v, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
       "Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, bool hnd) -> ()", _append, lambda *_: None)
define("merge_base2(Tensor[] v, Tensor[] s) -> (Tensor, Tensor)", _merge_base2,
       lambda v, s: (v[0].new_empty(v[0].shape), s[0].new_empty(s[0].shape, dtype=torch.float32)))
