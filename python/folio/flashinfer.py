"""The plan/run interface of FlashInfer over paged KV caches, on CPUs and GPUs, for torch tensors.

    from folio.flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    from folio.flashinfer import append_paged_kv_cache, merge_state

A paged KV cache is one tensor [pages, 2, ...] or a pair (k, v), in layout "NHD" [pages, page_size, kv_heads, size] or
"HND" [pages, kv_heads, page_size, size]. The lse of every function here is to the base 2, as in FlashInfer; elsewhere
in Folio it is natural. A row that sees no key gets zeros, and -inf in lse.

plan() reads its arrays on the host; if they lie on a GPU it waits for them, as FlashInfer's does. With
use_cuda_graph=True the number of sequences, and of rows, stays that of the first plan(). A later plan() is seen by
replays on the same stream. There is no workspace to pass: float_workspace_buffer may be None.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any, Optional, Union

import numpy as np
import torch

from . import _abi as abi
from . import _oneshot
from ._arrays import array, dtype_of, numpy_dtype
from ._run import refuse_gradients
from .batch import Batch
from .cache import KVCache
from .context import default_context
from .errors import ArgumentError, UnsupportedError
from .functional import merge_states as _merge
from .plan import Plan, attention_forward, options, run_layer
from .torch import define

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "append_paged_kv_cache",
           "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_state_in_place", "merge_states"]

_LOG2E = math.log2(math.e)
_keys = itertools.count()
_wrappers: dict[int, Any] = {}  # key: weak reference to a wrapper


def _host(value: Any, name: str, size: Optional[int] = None) -> np.ndarray:
    """An index array as int32 on the host; waits for a GPU."""
    a = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if a.ndim != 1 or not np.issubdtype(a.dtype, np.integer) or (size is not None and a.size != size):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {a.shape}; it must be int32 "
                            f"[{'n' if size is None else size}]")
    return np.ascontiguousarray(a, np.int32)


def _indptr(value: Any, name: str) -> np.ndarray:
    a = _host(value, name)
    if a.size < 1 or a[0] != 0 or (np.diff(a) < 0).any():
        raise ArgumentError(f"{name} must start at 0 and never decrease")
    return a


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
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            raise ArgumentError(f"{name} of the paged KV cache has shape {tuple(x.shape)}; it must have 4 dims")
    return k, v


def _wrap(context: Any, k: torch.Tensor, v: torch.Tensor, layout: str) -> KVCache:
    hnd = layout == "HND"

    def strides(x: torch.Tensor) -> tuple:
        page, a, b, _ = x.stride()
        return (page, b, a) if hnd else (page, a, b)

    heads, page_size = (k.shape[1], k.shape[2]) if hnd else (k.shape[2], k.shape[1])
    return _oneshot.wrap(context, array(k), array(v), k.shape[0], page_size, heads, strides(k), strides(v))


class _Wrapper:
    """One step's plan over paged caches; run() serves every layer."""

    def __init__(self, kv_layout: str, use_cuda_graph: bool, indices_buffer: Any) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ArgumentError(f'kv_layout is {kv_layout!r}; it must be "NHD" or "HND"')
        self._layout, self._graph = kv_layout, use_cuda_graph
        self._room = len(indices_buffer) if indices_buffer is not None else 0  # pages of a graph's step
        self._planned: Optional[tuple] = None  # plan and batch
        self._made_for: Any = None
        self._filled = False
        self._geometry: Any = None
        self._key = next(_keys)
        _wrappers[self._key] = weakref.ref(self)
        weakref.finalize(self, _wrappers.pop, self._key, None).atexit = False

    def _set(self, starts: Optional[Any], indptr: Any, indices: Any, last: Any, heads: int, kv_heads: int, size: int,
             v_size: int, page_size: int, causal: bool, pos_encoding_mode: str, window_left: int, soft_cap: Any,
             scale: Any, q_dtype: Any, kv_dtype: Any) -> None:
        if pos_encoding_mode != "NONE":
            raise UnsupportedError(f"pos_encoding_mode {pos_encoding_mode!r} is not supported, only 'NONE': rotate q "
                                   "and k before the call")
        pages = _indptr(indptr, "paged_kv_indptr")
        seqs = pages.size - 1
        blocks = _host(indices, "paged_kv_indices")
        ends = _host(last, "paged_kv_last_page_len", seqs)
        counts = np.diff(pages)
        if pages[-1] > blocks.size:
            raise ArgumentError(f"paged_kv_indptr ends at {pages[-1]}, but paged_kv_indices has {blocks.size} entries")
        wrong = (counts > 0) & ((ends < 1) | (ends > page_size))
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ArgumentError(f"paged_kv_last_page_len[{i}] = {ends[i]} is outside [1, {page_size}]")
        lens = np.where(counts > 0, (counts - 1) * page_size + ends, 0).astype(np.int32)
        rows = np.arange(seqs + 1, dtype=np.int32) if starts is None else _indptr(starts, "qo_indptr")
        if rows.size != seqs + 1:
            raise ArgumentError(f"qo_indptr has {rows.size} entries, but paged_kv_indptr has {seqs + 1}")
        self._step = (rows, lens, pages, blocks, causal)
        self._rows, self._page_size = int(rows[-1]), page_size
        kv_dtype = q_dtype if kv_dtype is None else kv_dtype
        self._geometry = (heads, kv_heads, size, v_size, numpy_dtype(dtype_of(q_dtype)).name,
                          numpy_dtype(dtype_of(kv_dtype)).name, scale,
                          (window_left, -1) if window_left >= 0 else (-1, -1), float(soft_cap or 0.0))
        self._filled = False
        if self._planned is not None and self._made_for[:2] == (self._geometry, page_size):
            context, num_blocks = self._made_for[2:]
            # here and not in run(), which a replayed graph does not call; run() if it may bring a larger cache
            if (self._graph and not context.on_host) or blocks.max(initial=0) < num_blocks:
                self._update(*self._planned)

    def _update(self, plan: Plan, batch: Batch) -> None:
        """Gives the step to the plan."""
        rows, lens, pages, blocks, causal = self._step
        extra = _oneshot.positions(rows, lens)
        if not causal:
            extra["causality"] = np.full(lens.size, abi.FOLIO_CAUSAL_NO, np.int32)
        batch.set_csr(pages, blocks, query_start=rows, seq_lens=lens, **extra)
        plan.update(batch)
        self._filled = True

    def _ready(self, context: Any, num_blocks: int) -> Plan:
        """The plan, made anew if caches or geometry need another one. It grows, unless it is for graphs."""
        if self._geometry is None:
            raise ArgumentError("plan() must be called before run()")
        made_for = (self._geometry, self._page_size, context, num_blocks)
        if self._planned is None or self._made_for != made_for:
            limits: dict[str, Any] = {}
            if self._graph and not context.on_host:
                lens, rows = self._step[1], max(self._rows, 1)
                seqs, longest = max(lens.size, 1), max(int(lens.max(initial=1)), self._room * self._page_size, 1)
                limits = {"max_seqs": seqs, "max_query_tokens": rows, "max_seq_len": longest,
                          "max_query_len": int(rows == seqs), "graph": True}
            plan = Plan(_oneshot.attention(context, *self._geometry), block_size=self._page_size,
                        num_blocks=num_blocks, **limits)
            self._planned = (plan, Batch(context, block_size=self._page_size))
            self._made_for, self._filled = made_for, False
        if not self._filled:
            self._update(*self._planned)
        return self._planned[0]

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: float, v_scale: float, sinks: Any,
             want_lse: bool, out: Any = None, lse: Any = None) -> tuple:
        context = default_context(array(q).device)
        cache = _wrap(context, k, v, self._layout)
        plan = self._ready(context, cache.num_blocks)
        if cache.block_size != self._page_size:
            raise ArgumentError(f"the cache has pages of {cache.block_size} tokens, but page_size of plan() was "
                                f"{self._page_size}")
        at = plan.attentions[0]
        tail = b""
        if sinks is not None or k_scale or v_scale:
            tail, keep = options(context, at, None, sinks, None, k_scale, v_scale)
        try:
            result = run_layer(attention_forward, (plan._as_parameter_, 0, abi.FOLIO_ATTENTION_DECODER), context, at, q,
                               None, None, cache, 0, out, lse if lse is not None else want_lse, tail)
        except ArgumentError:
            self._check_dtypes(q, k)
            raise
        if not want_lse:
            return result, None
        return result[0], result[1].mul_(_LOG2E)

    def _check_dtypes(self, q: torch.Tensor, k: torch.Tensor) -> None:
        for name, tensor, argument, planned in (("q", q, "q_data_type", self._geometry[4]),
                                                ("the paged KV cache", k, "kv_data_type", self._geometry[5])):
            found = str(tensor.dtype).rpartition(".")[2]
            if found != planned:
                raise ArgumentError(f"{name} has dtype {found}, but {argument} of plan() was {planned}; its default "
                                    "is float16")

    def run(self, q: torch.Tensor, paged_kv_cache: Union[torch.Tensor, tuple], *, q_scale: Optional[float] = None,
            k_scale: Optional[float] = None, v_scale: Optional[float] = None, out: Optional[torch.Tensor] = None,
            lse: Optional[torch.Tensor] = None, return_lse: bool = False, sinks: Optional[torch.Tensor] = None,
            **unused: Any) -> Any:
        """One layer. q [rows, heads, size]. Returns out, or (out, lse [rows, heads] to the base 2). k_scale and v_scale
        are for fp8 caches."""
        for name, value in unused.items():
            if name != "enable_pdl" and value is not None:
                raise UnsupportedError(f"run() does not support {name}")
        k, v = _unpack(paged_kv_cache, self._layout)
        if torch.is_grad_enabled():
            refuse_gradients(q, k, v)
        if q_scale not in (None, 1.0):
            raise UnsupportedError(f"q_scale is {q_scale}: put it into sm_scale")
        if k.element_size() > 1 and (k_scale not in (None, 1.0) or v_scale not in (None, 1.0)):
            raise UnsupportedError(f"k_scale and v_scale are for fp8 caches, but this one holds {k.dtype}")
        scales = (float(k_scale or 0.0), float(v_scale or 0.0))
        if torch.compiler.is_compiling() and out is None and lse is None:
            result, state = torch.ops.folio.flashinfer_run(q, k, v, *scales, sinks, self._key, return_lse)
        else:
            result, state = self._run(q, k, v, *scales, sinks, return_lse, out, lse)
        return (result, state) if return_lse else result

    forward = run

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Any, **arguments: Any) -> tuple:
        return self.run(q, paged_kv_cache, return_lse=True, **arguments)

    forward_return_lse = run_return_lse

    def end_forward(self) -> None:
        """Nothing to do; older versions of FlashInfer have it."""


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query row for each sequence."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None,
                 paged_kv_indices_buffer: Any = None, paged_kv_last_page_len_buffer: Any = None,
                 backend: str = "auto", jit_args: Any = None) -> None:
        _no_jit(jit_args)
        super().__init__(kv_layout, use_cuda_graph, paged_kv_indices_buffer)

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
             page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
             logits_soft_cap: Optional[float] = None, q_data_type: Any = "float16", kv_data_type: Any = None,
             data_type: Any = None, sm_scale: Optional[float] = None, **unused: Any) -> None:
        """The step's sequences: pages indices[indptr[i] : indptr[i + 1]], last_page_len[i] tokens in the last one."""
        if data_type is not None:
            q_data_type = kv_data_type = data_type
        _check_unused(unused, q_data_type)
        self._set(None, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, head_dim, page_size, True,
                  pos_encoding_mode, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    begin_forward = plan


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of query rows for each sequence: prompts, chunks, drafts."""

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
                 paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
                 backend: str = "auto", jit_args: Any = None) -> None:
        _no_jit(jit_args)
        super().__init__(kv_layout, use_cuda_graph, paged_kv_indices_buf)

    def plan(self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Optional[int] = None,
             custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False,
             pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None,
             window_left: int = -1, logits_soft_cap: Optional[float] = None, rope_scale: Any = None,
             rope_theta: Any = None, q_data_type: Any = "float16", kv_data_type: Any = None, **unused: Any) -> None:
        """The step's sequences: rows qo_indptr[i] to qo_indptr[i + 1] of q, and pages as in decode. The causal mask is
        aligned to the bottom right."""
        _check_unused(unused, q_data_type)
        if custom_mask is not None or packed_custom_mask is not None:
            raise UnsupportedError("custom_mask is not supported: use causal and window_left")
        self._set(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                  head_dim_qk, head_dim_vo or head_dim_qk, page_size, causal, pos_encoding_mode, window_left,
                  logits_soft_cap, sm_scale, q_data_type, kv_data_type)

    begin_forward = plan


# arguments of plan() that change nothing here
_HARMLESS = {"non_blocking", "block_tables", "seq_lens", "seq_lens_q", "max_token_per_sequence", "max_sequence_kv",
             "rope_scale", "rope_theta", "disable_split_kv", "fixed_split_size"}


def _check_unused(unused: dict, q_dtype: Any) -> None:
    o_dtype = unused.pop("o_data_type", None)
    if o_dtype is not None and dtype_of(o_dtype) != dtype_of(q_dtype):
        raise UnsupportedError(f"o_data_type is {o_dtype}; out has the dtype of q, {q_dtype}")
    for name, value in unused.items():
        if name not in _HARMLESS and value is not None:
            raise UnsupportedError(f"plan() does not support {name}")


def _no_jit(jit_args: Any) -> None:
    if jit_args is not None:
        raise UnsupportedError("jit_args is not supported: there are no kernels to compile at run time")


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


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> tuple:
    """(v, s) over both parts of the keys. v [rows, heads, size], s [rows, heads]."""
    call = torch.ops.folio.merge_base2 if torch.compiler.is_compiling() else _merge_base2
    return call([v_a, v_b], [s_a, s_b])


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
    call = torch.ops.folio.merge_base2 if torch.compiler.is_compiling() else _merge_base2
    return call(list(v.unbind(1)), list(s.unbind(1)))


def _merge_base2(values: list, states: list) -> tuple:
    out, lse = _merge([(v, s.to(torch.float32) * (1 / _LOG2E)) for v, s in zip(values, states)])
    return out, lse.mul_(_LOG2E)


# ---- operators, for torch.compile ----


def _run_op(q: Any, k: Any, v: Any, k_scale: float, v_scale: float, sinks: Any, key: int, want_lse: bool) -> tuple:
    found = _wrappers.get(key)
    wrapper = found() if found is not None else None
    if wrapper is None:
        raise ArgumentError(f"there is no wrapper with key {key}; it must live as long as compiled code calls it")
    out, lse = wrapper._run(q, k, v, k_scale, v_scale, sinks, want_lse)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


def _run_fake(q: Any, k: Any, v: Any, k_scale: float, v_scale: float, sinks: Any, key: int, want_lse: bool) -> tuple:
    lse = q.new_empty((q.shape[0], q.shape[1]) if want_lse else (0,), dtype=torch.float32)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1])), lse


define("flashinfer_run(Tensor q, Tensor k_cache, Tensor v_cache, float k_scale, float v_scale, Tensor? sinks, int key, "
       "bool lse) -> (Tensor, Tensor)", _run_op, _run_fake)
define("append_paged_kv_cache(Tensor k, Tensor v, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
       "Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, bool hnd) -> ()", _append, lambda *_: None)
define("merge_base2(Tensor[] v, Tensor[] s) -> (Tensor, Tensor)", _merge_base2,
       lambda v, s: (v[0].new_empty(v[0].shape), s[0].new_empty(s[0].shape, dtype=torch.float32)))
