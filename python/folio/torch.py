"""Operators for PyTorch: they work in torch.compile(fullgraph=True) and in CUDA graphs.

    step = folio.torch.Step()
    layers = [folio.torch.Layer(step, attention, cache, i) for i in range(num_layers)]
    ...
    plan.update(batch); step.plan = plan        # each step; this compiles nothing again
    out = layers[i](q, k, v)                    # in the model

A Layer has a number, `key`. The operators find it by that number when they run:

    folio::forward(q, k, v, k_cache, v_cache, key) -> out
    folio::forward_lse(q, k, v, k_cache, v_cache, key) -> (out, lse)
    folio::forward_out(q, k, v, out, k_cache, v_cache, key)        writes to out

k_cache and v_cache are the memory of the layer's cache. The operators write k and v there, so they are declared as
mutated: the compiler neither drops such a call nor moves reads of the cache across it. They may be None, if nothing
else in the compiled code touches the cache and every result is used. There is no backward pass: tensors that require
a gradient are refused in grad mode.

In a CUDA graph use a Plan with graph=True. A replay runs no Python code; it sees the batch of the last plan.update()
on its stream, or of plan.update_device() if that was captured too.
"""

from __future__ import annotations

import itertools
import math
import weakref
from functools import partial
from typing import Any, Callable, Optional

import torch

from ._run import refuse_gradients
from .attention import Attention, Rotary, type_of
from .cache import KVCache
from .errors import ArgumentError
from .plan import Plan, attention_forward, options, run_layer

_is_grad_enabled = torch.is_grad_enabled
_library = torch.library.Library("folio", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


def define(schema: str, call: Callable, fake: Callable) -> None:
    """Makes an operator folio::<schema> with one function for CPU and CUDA and one for shapes."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _library.impl(name, call, key)
    torch.library.register_fake(f"folio::{name}", fake, lib=_library)


class Step:
    """Which plan the layers run with. Set `plan` before each step, or once if it stays the same."""

    def __init__(self, plan: Optional[Plan] = None) -> None:
        self.plan = plan


_keys = itertools.count()
_objects: dict[int, Any] = {}  # key: weak reference


def register(found: Any) -> int:
    """The key by which operators find an object, as long as it lives."""
    key = next(_keys)
    _objects[key] = weakref.ref(found)
    weakref.finalize(found, _objects.pop, key, None).atexit = False
    return key


def find(kind: type, key: int) -> Any:
    found = _objects.get(key, lambda: None)()
    if not isinstance(found, kind):
        raise ArgumentError(f"there is no {kind.__module__}.{kind.__name__} with key {key}; it must live as long as it "
                            "is called")
    return found


class Layer:
    """One attention layer: geometry, cache, and what differs from layer to layer. Call it with q, k and v.

    attention   one of the attentions of the step's plan
    cache, layer   where K and V go; None: the layer has no cache
    k_cache, v_cache   if the cache wraps tensors: those tensors
    The others are as in Plan.forward.
    """

    def __init__(self, step: Step, attention: Attention, cache: Optional[KVCache] = None, layer: int = 0, *,
                 type: str = "decoder", slopes: Any = None, sinks: Any = None, k_scale: float = 0.0,
                 v_scale: float = 0.0, k_head_scales: Any = None, v_head_scales: Any = None,
                 rotary: Optional[Rotary] = None, k_cache: Optional[torch.Tensor] = None,
                 v_cache: Optional[torch.Tensor] = None) -> None:
        self.step, self.attention, self.cache, self.layer = step, attention, cache, layer
        self._type = type_of(type)
        self._tail, self._keep = options(attention.context, attention, slopes, sinks, None, k_scale, v_scale,
                                         k_head_scales, v_head_scales, rotary)
        if cache is not None and k_cache is None:
            k_cache, v_cache = (None if a is None else torch.from_dlpack(a) for a in cache.arrays(layer))
        self.k_cache, self.v_cache = k_cache, v_cache
        self._plan: Optional[Plan] = None
        self._number = 0  # of the attention in the plan
        self.key = register(self)

    def __call__(self, q: torch.Tensor, k: Optional[torch.Tensor] = None, v: Optional[torch.Tensor] = None,
                 out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """out of the layer. q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size], or with the last two
        dims joined."""
        if _is_grad_enabled():
            refuse_gradients(q, k, v)
        if out is None:
            at = self.attention
            if q.dim() == 3 and at.v_head_size == at.head_size and torch.compiler.is_compiling():
                out = torch.empty_like(q, memory_format=torch.contiguous_format)  # cheaper than in the operator
            else:
                return torch.ops.folio.forward(q, k, v, self.k_cache, self.v_cache, self.key)
        torch.ops.folio.forward_out(q, k, v, out, self.k_cache, self.v_cache, self.key)
        return out

    def lse(self, q: torch.Tensor, k: Optional[torch.Tensor] = None, v: Optional[torch.Tensor] = None) -> tuple:
        """(out, lse [tokens, heads]) of the layer."""
        if _is_grad_enabled():
            refuse_gradients(q, k, v)
        return torch.ops.folio.forward_lse(q, k, v, self.k_cache, self.v_cache, self.key)

    def _bind(self, plan: Optional[Plan]) -> Plan:
        """The number of the attention in a plan that this layer has not run with last."""
        if plan is None:
            raise ArgumentError("the step has no plan: set step.plan before the layers run")
        for number, attention in enumerate(plan.attentions):
            if attention is self.attention:
                self._plan, self._number = plan, number
                return plan
        raise ArgumentError(f"the step's plan was made without this layer's attention, {self.attention!r}")


def _run(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, key: int, out: Any = None, lse: bool = False) -> Any:
    try:
        layer = _objects[key]()
        plan = layer.step.plan
    except (KeyError, AttributeError):  # it was never there, or it is gone
        layer = find(Layer, key)
        plan = layer.step.plan
    if plan is None or plan is not layer._plan:
        plan = layer._bind(plan)
    return run_layer(attention_forward, (plan._handle or plan._closed(), layer._number, layer._type), plan.context,
                     layer.attention, q, k, v, layer.cache, layer.layer, out, lse, layer._tail)


def _run_out(q: Any, k: Any, v: Any, out: Any, k_cache: Any, v_cache: Any, key: int) -> None:
    _run(q, k, v, k_cache, v_cache, key, out)


def _fake(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, key: int) -> tuple:
    at = find(Layer, key).attention
    heads = (at.num_heads, at.v_head_size)
    out = q.new_empty((q.shape[0], *heads) if q.dim() == 3 else (q.shape[0], math.prod(heads)))
    return out, q.new_empty((q.shape[0], at.num_heads), dtype=torch.float32)


define("forward(Tensor q, Tensor? k, Tensor? v, Tensor(a!)? k_cache, Tensor(b!)? v_cache, int key) -> Tensor",
       _run, lambda *given: _fake(*given)[0])
define("forward_lse(Tensor q, Tensor? k, Tensor? v, Tensor(a!)? k_cache, Tensor(b!)? v_cache, int key) "
       "-> (Tensor, Tensor)", partial(_run, lse=True), _fake)
define("forward_out(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, Tensor(b!)? k_cache, Tensor(c!)? v_cache, int key) "
       "-> ()", _run_out, lambda *_: None)
