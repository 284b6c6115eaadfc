"""Plan: limits, schedule and workspace. Made once, updated once per step, used by every layer of the step."""

from __future__ import annotations

import ctypes
import struct
from collections import namedtuple
from typing import Any, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _abi as abi
from ._arrays import _BY_NAME, Array, array, own_array
from ._library import Handle, check, create, handle_of, integer, lib, make, packer, text
from ._run import Torch, empty, floats, lse_array, place_check, refuse_gradients, rows, run_of
from .attention import TYPES, Attention, Rotary, type_of
from .batch import Batch, causality
from .cache import KVCache
from .context import Context, given_or_default
from .device import DeviceArray
from .errors import ArgumentError

attention_forward = lib.folio_attention_forward
_HEAD = packer(abi.folio_tensors, end="slopes")  # what every forward gives
_FIRST = 0  # `is` with it is true for every 0 that CPython makes
type_ = type  # forward() has an argument of that name
_TAIL = packer(abi.folio_tensors, first="slopes")  # what few do


class BadWrite(NamedTuple):
    """The first number that is NaN or infinite in what forwards of a plan wrote."""

    what: str  # "k", "v" or "out"
    layer: int  # as forward() was given it
    seq: int  # number of the sequence in its step
    position: int  # of the token in its sequence, cached ones counted; folio.h says which number out has elsewhere
    head: int  # kv head of k and v, query head of out
    step: int  # which update of the plan: 1 is the first; each replay of a captured one counts
    attention: int  # number in the plan's list
    type: str


class Plan(Handle):
    """Runs attention layers over a step's batch.

    max_seqs, max_query_tokens, max_seq_len   limits of a step: give all of them, and updates and forwards allocate
                        nothing in C. Or give none: the plan grows with its steps. graph and update_device need limits
    attentions          one Attention or a list of them
    types               for each attention the types it runs as: "decoder" (default), "encoder", "encoder_only",
                        "encoder_decoder"; a name, or a list of names or of lists of names
    cache, cross_cache  give the block size and the number of blocks
    graph               fixed buffers, for CUDA graphs
    batch_invariant     on a GPU: the bits of a sequence do not depend on the rest of the batch (always so on CPUs)
    private_slots       a promise: only a new token's own sequence reads its slot in the same step, and the slot is -1
                        or the token's place in the block table. On a GPU, steps of one token per sequence can then do
                        with one launch less per layer (docs/cuda.md has the conditions)
    note_bad            forwards look for NaN and infinity in k, v and out that they write: bad_write() says where
    """

    def __init__(self, attentions: Union[Attention, Sequence[Attention]], *, max_seqs: int = 0,
                 max_query_tokens: int = 0, max_seq_len: int = 0, cache: Optional[KVCache] = None,
                 cross_cache: Optional[KVCache] = None, types: Any = None, block_size: int = 0, num_blocks: int = 0,
                 cross_num_blocks: int = 0, max_encoder_tokens: int = 0, max_query_len: int = 0, graph: bool = False,
                 batch_invariant: bool = False, private_slots: bool = False,
                 note_bad: bool = False, context: Optional[Context] = None) -> None:
        self.attentions = [attentions] if isinstance(attentions, Attention) else list(attentions)
        if not self.attentions:
            raise ArgumentError("attentions is empty")
        handles = (ctypes.c_void_p * len(self.attentions))(
            *[handle_of(a, Attention, f"attentions[{i}]") for i, a in enumerate(self.attentions)])
        self.context = self.attentions[0].context if context is None else given_or_default(context)
        desc = make(abi.folio_plan_desc, attentions=ctypes.addressof(handles), num_attentions=len(self.attentions),
                    block_size=block_size, num_blocks=num_blocks, cross_num_blocks=cross_num_blocks,
                    cache=None if cache is None else handle_of(cache, KVCache, "cache"), max_seqs=max_seqs,
                    cross_cache=None if cross_cache is None else handle_of(cross_cache, KVCache, "cross_cache"),
                    max_query_tokens=max_query_tokens, max_seq_len=max_seq_len, max_encoder_tokens=max_encoder_tokens,
                    max_query_len=max_query_len,
                    flags=abi.FOLIO_PLAN_GRAPH * graph | abi.FOLIO_PLAN_BATCH_INVARIANT * batch_invariant
                    | abi.FOLIO_PLAN_PRIVATE_SLOTS * private_slots | abi.FOLIO_PLAN_NOTE_BAD * note_bad)
        if types is not None:
            given = [types] * len(self.attentions) if isinstance(types, str) else list(types)
            if len(given) != len(self.attentions):
                raise ArgumentError(f"types has {len(given)} entries, but there are {len(self.attentions)} attentions")
            sets = [sum(1 << type_of(name) for name in ([t] if isinstance(t, str) else t)) for t in given]
            bits = (ctypes.c_uint32 * len(sets))(*sets)
            desc.types = ctypes.addressof(bits)
        super().__init__(create(lib.folio_plan_create, self.context, ctypes.byref(desc)), lib.folio_plan_destroy,
                         (self.context, self.attentions))
        self.max_seqs, self.max_query_tokens, self.max_seq_len = max_seqs, max_query_tokens, max_seq_len
        self.max_encoder_tokens = max_encoder_tokens
        self._batch: Any = None

    def update(self, batch: Batch, *, stream: Optional[int] = None) -> None:
        """Prepares the plan for this step's batch, which must not change until the next update."""
        check(lib.folio_plan_update(self._as_parameter_, handle_of(batch, Batch, "batch"),
                                    run_of(self.context, None, stream)))
        self._batch = batch

    def update_device(self, *, seq_lens: Any, block_tables: Any = None, query_start: Any = None,
                      num_query_tokens: int = 0, slot_mapping: Any = None, causal: Optional[bool] = None,
                      causality_per_seq: Any = None, first_query_pos: Any = None, first_key_pos: Any = None,
                      stream: Optional[int] = None) -> None:
        """The same from arrays in the memory of the GPU, without waiting; can be captured in a CUDA graph."""
        arrays = {"seq_lens": (seq_lens, "int32"), "query_start": (query_start, "int32"),
                  "slots": (slot_mapping, "int64"), "causality": (causality_per_seq, "int32"),
                  "first_query_pos": (first_query_pos, "int64"), "first_key_pos": (first_key_pos, "int64")}
        fields, keep = {}, []
        for name, (value, kind) in arrays.items():
            if value is not None:
                a = _device_index(self.context, value, kind, name, 1)
                fields[name] = a.data
                keep.append(a)
        step = make(abi.folio_step, num_seqs=keep[0].shape[0], num_query_tokens=num_query_tokens, on_device=1, **fields)
        if block_tables is not None:
            table = _device_index(self.context, block_tables, "int32", "block_tables", 2)
            stride = table.strides[0] if table.shape[0] > 1 else table.shape[1]
            step.table = abi.folio_table(kind=abi.FOLIO_TABLE_ROWS, indices=table.data, row_stride=stride)
            keep.append(table)
        if causal is not None and causality_per_seq is None and causality(causal) == abi.FOLIO_CAUSAL_NO:
            raise ArgumentError("causal=False needs causality_per_seq on the device")
        check(lib.folio_plan_update_step(self._as_parameter_, ctypes.byref(step),
                                         run_of(self.context, seq_lens, stream)))
        self._batch = keep

    def forward(self, q: Any, k: Any = None, v: Any = None, *, cache: Optional[KVCache] = None, layer: int = 0,
                attention: int = 0, type: str = "decoder", out: Any = None, lse: Any = None, slopes: Any = None,
                sinks: Any = None, bias: Any = None, k_scale: float = 0.0, v_scale: float = 0.0,
                k_head_scales: Any = None, v_head_scales: Any = None, rotary: Optional[Rotary] = None,
                positions: Any = None, append: bool = False, stream: Optional[int] = None,
                workspace: Optional[DeviceArray] = None) -> Any:
        """One attention layer over the batch of the last update: writes k and v to the cache, then attends.

        q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size], or the same with the last two dims
        joined; or [seqs, rows, heads, head_size], with one stride between rows. Returns out, or (out, lse) if lse is
        True or an array. out: where the result goes; a new array of q's library if None. slopes: ALiBi [heads].
        sinks: [heads]. bias: [seqs, heads, queries, keys], dims of 1 are broadcast. append: the keys are the cached
        ones, then k and v; nothing is written. workspace: from new_workspace(), if several threads run this plan at
        once; the plan's own serves one at a time.
        """
        at = self.attentions[0] if attention is _FIRST else self._attention(attention)
        if type_(layer) is not int or layer >> 31:
            layer = integer(layer, "layer")
        if cache is not None and type_(cache) is not KVCache:
            handle_of(cache, KVCache, "cache")
        tail, keep = b"", None
        if (slopes is not None or sinks is not None or bias is not None or rotary is not None or append or k_scale
                or v_scale or k_head_scales is not None or v_head_scales is not None):
            tail, keep = options(self.context, at, slopes, sinks, bias, k_scale, v_scale, k_head_scales, v_head_scales,
                                 rotary, positions, append, (*getattr(q, "shape", ()), 0)[0])
        elif positions is not None:
            raise ArgumentError("positions are given without rotary")
        return run_layer(attention_forward, (self._handle or self._closed(), attention, type_of(type)), self.context,
                         at, q, k, v, cache, layer, out, lse, tail, stream, workspace)

    def _attention(self, number: int) -> Attention:
        if not 0 <= integer(number, "attention") < len(self.attentions):
            raise ArgumentError(f"attention {number} is outside [0, {len(self.attentions)}), those of the plan")
        return self.attentions[number]

    def new_workspace(self) -> DeviceArray:
        """Memory for forward(workspace=...): one for each further thread, or stream, that runs this plan."""
        return DeviceArray(self.context, (max(self.workspace_size, 64),), "int8")

    def findings(self) -> None:
        """Raises ArgumentError if a sequence of update_device() was rejected on the GPU. Never waits."""
        check(lib.folio_plan_get_findings(self._as_parameter_, None))

    def bad_write(self) -> Optional[BadWrite]:
        """The first bad write so far, of a plan with note_bad; None if there is none. Never waits: on a GPU it knows
        what has run by now. It is of the first step that had any. The update after it was returned forgets it, and
        later steps are noted again."""
        bad = make(abi.folio_plan_bad_write)
        check(lib.folio_plan_get_bad_write(self._as_parameter_, ctypes.byref(bad)))
        if not bad.found:
            return None
        return BadWrite(("k", "v", "out")[bad.what], bad.layer, bad.seq, bad.position, bad.head, bad.step,
                        bad.attention, list(TYPES)[bad.type])

    def info(self, attention: int = 0, type: str = "decoder") -> dict[str, Any]:
        """Names of the kernels for this step, and into how many pieces the work was cut."""
        info = make(abi.folio_plan_info)
        check(lib.folio_plan_get_info(self._as_parameter_, integer(attention, "attention"), type_of(type),
                                      ctypes.byref(info)))
        return {"kernel": text(info.kernel), "num_items": info.num_items, "num_split_items": info.num_split_items,
                "split_len": info.split_len, "fallback": text(info.fallback)}

    @property
    def workspace_size(self) -> int:
        size = ctypes.c_size_t()
        check(lib.folio_plan_get_workspace_size(self._as_parameter_, ctypes.byref(size)))
        return size.value


# what run_layer() reads of an Attention, where there is none
Dims = namedtuple("Dims", "num_heads num_kv_heads head_size v_head_size row_size")


def run_layer(call: Any, first: tuple, ctx: Context, at: Any, q: Any, k: Any, v: Any, cache: Optional[KVCache],
              layer: int, out: Any, lse: Any, tail: bytes, stream: Optional[int] = None, workspace: Any = None) -> Any:
    """One layer by `call`, a function of the library whose first arguments are `first`: makes its folio_tensors from
    arrays and from the options that are packed in `tail`. at: an Attention, or Dims. Returns out, or (out, lse). Each
    line here is paid in every layer."""
    heads = at.num_heads
    if Torch.is_grad_enabled():
        refuse_gradients(q, k, v)
    run = None
    if not ctx.on_host:
        if stream is None:
            stream = ctx.stream(q)
        run = run_of(ctx, q, stream, workspace)
    elif workspace is not None:
        run = run_of(ctx, q, None, workspace)
    q_data, dtype, tokens, q_token, q_head, q_keep = rows(ctx, q, "q", heads, at.head_size, False, stream)
    k_data = k_type = k_tokens = k_token = k_head = v_data = v_type = v_tokens = v_token = v_head = 0
    if k is not None:
        k_data, k_type, k_tokens, k_token, k_head, k_keep = rows(ctx, k, "k", at.num_kv_heads, at.head_size, False,
                                                                 stream)
    if v is not None:
        v_data, v_type, v_tokens, v_token, v_head, v_keep = rows(ctx, v, "v", at.num_kv_heads, at.v_head_size, False,
                                                                 stream)
    if out is None and q_keep is None and q_head == at.v_head_size and q_token == heads * q_head == at.row_size:
        out = Torch.empty_like(q)  # q has no gaps, so out has none
        o_data, o_type, o_tokens, o_token, o_head = out.data_ptr(), dtype, tokens, q_token, q_head
    else:
        if out is None:
            shape = q.shape if hasattr(q, "shape") else array(q).shape
            size = heads * at.v_head_size if len(shape) == 2 else at.v_head_size
            out = empty(ctx, (*shape[:-1], size), dtype, q)
        o_data, o_type, o_tokens, o_token, o_head, o_keep = rows(ctx, out, "out", heads, at.v_head_size, True,
                                                                 stream)
    lse_data = lse_token = lse_head = 0
    if lse is False:
        lse = None
    elif lse is not None:
        if lse is True:
            lse = empty(ctx, (tokens, heads), abi.FOLIO_F32, q)
        a = lse_array(ctx, lse, "lse", tokens, heads, True, stream)
        lse_data, (lse_token, lse_head) = a.data, a.strides
    fields = _HEAD.pack(_HEAD.size + len(tail), q_data, dtype, tokens, q_token, q_head, k_data, k_type, k_tokens,
                        k_token, k_head, v_data, v_type, v_tokens, v_token, v_head, o_data, o_type, o_tokens,
                        o_token, o_head, lse_data, lse_token, lse_head) + tail
    status = call(*first, None if cache is None else cache._handle or cache._closed(), layer, fields, run)
    if status:
        check(status)
    return out if lse is None else (out, lse)


def _device_index(context: Context, value: Any, kind: str, name: str, rank: int) -> Array:
    a = array(value)
    place_check(context, a, name)
    if a.dtype != kind or len(a.shape) != rank or (a.shape[-1] > 1 and a.strides[-1] != 1):
        raise ArgumentError(f"{name} has dtype {a.dtype} and shape {tuple(a.shape)}; it must be {kind} with {rank} "
                            "dim(s), the last contiguous")
    return a


def options(context: Context, at: Any, slopes: Any = None, sinks: Any = None, bias: Any = None,
            k_scale: float = 0.0, v_scale: float = 0.0, k_head_scales: Any = None, v_head_scales: Any = None,
            rotary: Optional[Rotary] = None, positions: Any = None, append: bool = False, tokens: int = 0) -> tuple:
    """(the packed fields of folio_tensors from slopes on, what keeps their memory alive)."""
    slopes_at, keep_slopes = floats(context, slopes, "slopes", at.num_heads)
    sinks_at, keep_sinks = floats(context, sinks, "sinks", at.num_heads)
    k_scales_at, keep_k = floats(context, k_head_scales, "k_head_scales", at.num_kv_heads)
    v_scales_at, keep_v = floats(context, v_head_scales, "v_head_scales", at.num_kv_heads)
    positions_at, keep_positions = 0, None
    if positions is not None:
        if rotary is None:
            raise ArgumentError("positions are given without rotary")
        if context.place[0] == "cpu":
            keep_positions = array(own_array(positions, np.int64, "positions"))
        else:
            keep_positions = _device_index(context, positions, "int64", "positions", 1)
        if tuple(keep_positions.shape) != (tokens,):
            raise ArgumentError(f"positions has shape {tuple(keep_positions.shape)}; it must be [{tokens}]")
        positions_at = keep_positions.data
    bias_fields, keep_bias = _bias(context, bias)
    rotary_at = 0 if rotary is None else handle_of(rotary, Rotary, "rotary")
    try:
        packed = _TAIL.pack(slopes_at, sinks_at, *bias_fields, k_scale, v_scale,
                            abi.FOLIO_KV_APPEND if append else 0, rotary_at, positions_at, k_scales_at, v_scales_at)
    except struct.error:
        raise ArgumentError(f"k_scale is {k_scale!r} and v_scale {v_scale!r}; they must be numbers") from None
    return packed, (keep_slopes, keep_sinks, keep_k, keep_v, keep_positions, keep_bias, rotary)


def _bias(context: Context, value: Any) -> tuple:
    """(the fields of a folio_bias, what keeps its memory alive)."""
    if value is None:
        return (0,) * 10, None
    a = array(value)
    place_check(context, a, "bias")
    if len(a.shape) != 4 or a.dtype not in ("float32", "float16", "bfloat16"):
        raise ArgumentError(f"bias has dtype {a.dtype} and shape {tuple(a.shape)}; it must be f32, f16 or bf16 "
                            "[seqs, heads, queries, keys]")
    shape = [n if s else 1 for n, s in zip(a.shape, a.strides)]  # a dim that expand() made is broadcast by the library
    strides = [s if n > 1 else 1 for n, s in zip(shape, a.strides)]
    return (a.data, _BY_NAME[a.dtype], *shape, *strides), a
