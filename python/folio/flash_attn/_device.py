"""Steps on a GPU: the layers of a step share an update of their plan, and a layer that ran before is found again.

A call is of the step that a plan holds if it is made of the same index tensors, which torch has not changed, for K at
another place. Kernels that are not torch's may write to the tensors between two steps: so a place that comes again is
another step. If the layer ran with such arguments before, only addresses are new: nothing is checked again.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, NamedTuple, Optional

from .. import _abi as abi
from .. import _oneshot
from .._arrays import is_torch
from .._library import check
from .._run import rows, run_of
from ..plan import _HEAD, attention_forward
from ..plan import options as packed
from .layers.rotary import places

_NUMBERS = (type(None), int, bool)


def on_gpu(x: Any) -> bool:
    return getattr(x, "is_cuda", False)  # torch's tensors have it


class Call(NamedTuple):
    """The arguments of a function, and what tells calls apart."""

    given: tuple
    options: tuple
    new: tuple  # k and v that are stored first
    extra: tuple  # slopes, sinks and scales, and what rotary needs
    made_of: tuple  # tensors and numbers of the step
    step: list  # what all layers of a step have in common
    place: int  # of K
    layer: tuple  # by which the layer is found

    def own(self) -> list:
        """What else is the layer's own: options, and how its tensors lie."""
        q, k, v = self.given[:3]
        own = [q.stride(), q.dtype, q.is_neg(), q.get_device(), k.shape, k.stride(), k.dtype, k.is_neg(), v.shape,
               v.stride(), v.dtype, v.is_neg(), self.options[:5]]
        for x in self.new if self.new[0] is not None else ():
            own += x.shape, x.stride(), x.dtype, x.is_neg(), x.get_device()
        return own + [x if type(x) in _NUMBERS else (id(x), x.data_ptr(), x._version) for x in self.extra]


def call_of(name: str, first: int, given: tuple, options: tuple) -> Optional[Call]:
    """given: q, k, v, those of the layer, from `first` on those of the step, and qv. None if index arrays are no
    tensors, which the function refuses."""
    (q, k, v), index, new = given[:3], given[first:-1], given[3:5] if first > 3 else (None, None)
    try:
        step = [x if type(x) in _NUMBERS else (id(x), x.data_ptr(), x._version) for x in index]
    except AttributeError:
        return None
    except RuntimeError:  # torch does not count the changes of tensors made in inference mode
        step = [object()]  # is equal to no other step
    place, shape = k.data_ptr(), q.shape
    step += shape, q.dtype, k.shape, name, options[1], new[0] is not None
    return Call(given, options, new, options[5:9] + given[5:first], index, step, place,
                (place, v.data_ptr(), name, shape, given[-1] is None))


def _lies(planned: Any, at: Any, x: Any, name: str) -> tuple:
    """Type, rows and strides of q, k, v or out; None: zeros."""
    heads = at.num_kv_heads if name in "kv" else at.num_heads
    size = at.head_size if name in "qk" else at.v_head_size
    return (0, 0, 0, 0) if x is None else rows(planned.plan.context, x, name, heads, size, name == "out")[1:5]


class _Step(NamedTuple):
    """How a plan is updated."""

    arrays: Callable  # (where rows of q begin, lengths, tables) on the GPU, of the step's tensors and numbers
    rows: int
    more: bool  # sequences may have more rows than keys; then each row becomes a sequence of its own
    causal: bool
    stream: Any

    def update(self, planned: Any, index: tuple, call: Optional[Call]) -> None:
        if planned.step:  # False: it stays so, for a CUDA graph has this plan
            planned.step = None
        starts, lens, tables = self.arrays(*index)
        torch, extra = sys.modules["torch"], {}
        if self.more:
            seq, place = places(starts, lens - (starts[1:] - starts[:-1]), self.rows)
            extra = {"first_query_pos": place.long(), "first_key_pos": torch.zeros_like(place, dtype=torch.int64)}
            lens, tables, starts = lens[seq], tables[seq], None
        planned.plan.update_device(
            seq_lens=lens, block_tables=tables, query_start=starts, num_query_tokens=self.rows, stream=self.stream,
            causality_per_seq=None if self.causal else torch.full_like(lens, abi.FOLIO_CAUSAL_NO), **extra)
        if call is not None and planned.step is not False:  # with the tensors: no others get their ids
            planned.step = call.step, {call.place}, index


class _Layer:
    """What a layer's forward gives the library, but for addresses. It keeps no plan alive."""

    own: Any = None  # Call.own()
    extra: Any = None  # the tensors whose ids are in it: no others get these
    index: Any = None  # numbers, and shapes of tensors, of a step

    def __init__(self, planned: Any, at: Any, cache: Any, step: _Step, q: Any, k: Any, v: Any, options: dict) -> None:
        self.planned, self.at, self.cache, self.step = weakref.ref(planned), at, cache, step
        self.q, self.k, self.v = (_lies(planned, at, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        self.out = *self.q[:2], at.num_heads * at.v_head_size, at.v_head_size  # if it is not given
        some = any(x is not None for x in options.values())
        self.tail, self.keep = packed(at.context, at, **options) if some else (b"", None)
        self.run = run_of(planned.plan.context, None, step.stream)

    def forward(self, planned: Any, q: Any, k: Any, v: Any, out: Any, out_lies: tuple, lse: Any) -> None:
        """lse [heads, rows]."""
        fields = _HEAD.pack(_HEAD.size + len(self.tail), q.data_ptr(), *self.q, 0 if k is None else k.data_ptr(),
                            *self.k, 0 if v is None else v.data_ptr(), *self.v, out.data_ptr(), *out_lies,
                            *((0, 0, 0) if lse is None else (lse.data_ptr(), 1, lse.shape[1]))) + self.tail
        status = attention_forward(planned.plan._handle, 0, 0, self.cache and self.cache._handle, 0, fields, self.run)
        if status:
            check(status)


def _holds(planned: Any, call: Optional[Call]) -> bool:
    """Whether this is the call of another layer of the step that the plan holds; then it counts as one."""
    last = planned.step
    if not last or call is None or last[0] != call.step or call.place in last[1]:
        return False
    last[1].add(call.place)
    return True


def again(call: Call, out: Any) -> Optional[tuple]:
    """(out, lse) of a layer that ran with such arguments before, also in a step of other lengths. None: there is
    none."""
    layer: Any = _oneshot.kept.layers.get(call.layer)
    planned = None if layer is None else layer.planned()
    torch, (q, *_) = sys.modules["torch"], call.given
    if (planned is None or layer.own != call.own() or layer.step.stream != planned.plan.context.stream()
            or torch.cuda.is_current_stream_capturing()):
        return None
    if not _holds(planned, call):
        if planned.step is False or layer.index != [x if type(x) in _NUMBERS else x.shape for x in call.made_of]:
            return None
        layer.step.update(planned, call.made_of, call)
    lies, lse = layer.out, None
    if out is not None:
        lies = _lies(planned, layer.at, out, "out")
    else:
        out = torch.empty_like(q) if layer.q == lies else q.new_empty((*q.shape[:-1], lies[3]))
    if call.options[-1]:
        lse = q.new_empty((layer.at.num_heads, lies[1]), dtype=torch.float32)
    layer.forward(planned, q, *call.new, out, lies, lse)
    return out, lse if q.ndim == 3 else by_sequence(lse, q.shape[0])


def forward(at: Any, q: Any, out: Any, lse: Any, seqs: int, rows: int, query_len: int, longest: int,
            arrays: Callable, index: tuple, call: Any, *, causal: bool, more: bool = False, cache: Any = None,
            k: Any = None, v: Any = None, **options: Any) -> None:
    """Attention with lengths on a GPU; lse [heads, rows]. The others are explained at _Step."""
    if more:
        seqs, query_len = rows, 1
    step = _Step(arrays, rows, more, causal, at.context.stream())
    planned = _oneshot.device_plan(at, cache.block_size if cache else 0, cache.num_blocks if cache else 0, seqs, rows,
                                   query_len, longest, step.stream)
    if not _holds(planned, call):
        step.update(planned, index, call)
    layer = _Layer(planned, at, cache, step, q, k, v, options)
    # it is kept if its tensors are those of the call, not copies of them
    if cache and call and q is call.given[0] and k is call.new[0] and v is call.new[1]:
        layer.own, layer.extra = call.own(), call.extra
        layer.index = [x if type(x) in _NUMBERS else x.shape for x in call.made_of]
        _oneshot.kept.layers.put(call.layer, layer)
    layer.forward(planned, q, k, v, out, _lies(planned, at, out, "out"), lse)


def joined(x: Any) -> Any:
    """[seqs, rows, heads, size], as [seqs * rows, heads, size] if its rows may have no single stride: a view of a
    tensor takes 1.4 us."""
    seqs, rows, heads, size = x.shape  # once: a tensor makes it anew
    return x if rows == 1 or (is_torch(x) and x.is_contiguous()) else x.reshape(seqs * rows, heads, size)


def by_sequence(lse: Any, seqs: int) -> Any:
    """lse [heads, seqs * rows] as [seqs, heads, rows]."""
    if lse is None:
        return None
    lse = lse.reshape(lse.shape[0], seqs, -1) if seqs else lse.reshape(lse.shape[0], 0, 0)
    return lse.transpose(0, 1) if is_torch(lse) else lse.transpose(1, 0, 2)
