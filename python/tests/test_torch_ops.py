"""The operators of folio.torch: eager, compiled, checked by torch's own opcheck, and in CUDA graphs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from numpy_math import attention, rotate
from torch_math import DTYPES, check

import core_support
import folio
import folio.torch

LENS = [(1, 17), (3, 3), (5, 40), (1, 1), (16, 33)]  # new tokens, and all of them


class Step:
    """A step of core_support with torch tensors, and its plan."""

    def __init__(self, context, device, lens, dtype=torch.float32, v_size=None, **options):
        names = dict(zip(DTYPES, ("f32", "f16", "bf16")))
        self.core = core_support.Step(core_support.Arrays("torch", device, context), *map(list, zip(*lens)), size=64,
                                      v_size=v_size, dtype=names[dtype])
        self.cache, self.batch = self.core.cache, self.core.batch()
        self.plan = self.core.ready(self.batch, **options)
        self.attention = self.plan.attentions[0]
        self.q, self.k, self.v = self.core.inputs()

    def new(self):
        return self.k, self.v

    def expected(self, **options):
        options = {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        return tuple(torch.from_numpy(x) for x in self.core.expected(**options))


def layer_of(step, **options):
    return folio.torch.Layer(folio.torch.Step(step.plan), step.attention, step.cache, 0, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(context, device, dtype):
    step = Step(context, device, LENS, dtype)
    layer = layer_of(step)
    k, v = step.new()
    check(layer(step.q, k, v), step.expected()[0])
    out = torch.empty_like(step.q)
    assert layer(step.q, k, v, out=out) is out
    check(out, step.expected()[0])
    out, lse = layer.lse(step.q, k, v)
    check(out, step.expected()[0])
    check(lse, step.expected()[1], "lse")


def test_options_of_a_layer(context, device):
    step = Step(context, device, LENS, soft_cap=5.0, window=(7, 0))
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    layer = layer_of(step, slopes=slopes, sinks=sinks)
    want = step.expected(soft_cap=5.0, window=(7, 0), slopes=slopes, sinks=sinks)[0]
    del slopes, sinks  # the layer keeps them
    gc.collect()
    check(layer(step.q, *step.new()), want)


def test_rotary_of_a_layer(context, device):
    step = Step(context, device, [(3, 3), (2, 2)])
    rotary = folio.Rotary(context, num_dims=64, num_positions=64)
    k, v = step.new()
    out = layer_of(step, rotary=rotary)(step.q, k, v)
    positions = np.array([0, 1, 2, 0, 1])
    q, k = (rotate(x.cpu().numpy(), positions, 64) for x in (step.q, k))
    check(out, step.expected(q=q, k=k)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_equals_eager(context, device, dtype):
    step = Step(context, device, LENS, dtype)
    layer = layer_of(step)
    weight = torch.randn(4 * 64, 4 * 64, device=device).to(dtype) / 16

    def model(q, k, v):
        hidden = layer(q, k, v).flatten(1) @ weight
        out = torch.empty_like(q)
        layer(q + hidden.view_as(q), None, None, out=out)
        return torch.relu(out), layer.lse(q)[1]

    k, v = step.new()
    with torch.no_grad():
        want = model(step.q, k, v)
        got = torch.compile(model, fullgraph=True)(step.q, k, v)
    for a, b in zip(got, want):
        check(a, b.double().cpu())


def test_compiled_code_writes_the_cache_even_if_out_is_not_used(context, device):
    step = Step(context, device, [(1, 5)])
    layer = layer_of(step)
    k, v = step.new()

    @torch.compile(fullgraph=True)
    def write(q, k, v):
        layer(q, k, v)
        return q + 1

    with torch.no_grad():
        write(step.q, k, v)
        check(layer(step.q), step.expected()[0])  # the slot held NaN before


def test_compiled_code_orders_reads_of_the_cache(context, device):
    keys, values = torch.zeros(2, 16, 2, 64, device=device), torch.zeros(2, 16, 2, 64, device=device)
    cache = folio.KVCache.wrap([keys], [values], context=context)
    attention = folio.Attention(context, num_heads=2, head_size=64)
    plan = folio.Plan(attention, max_seqs=1, max_query_tokens=1, max_seq_len=32, cache=cache)
    batch = folio.Batch(context, cache=cache)
    batch.add(1, 3, [1])
    plan.update(batch)
    layer = folio.torch.Layer(folio.torch.Step(plan), attention, cache, k_cache=keys, v_cache=values)

    @torch.compile(fullgraph=True)
    def model(q, k, v, keys):
        before = keys[1, 2] * 2
        layer(q, k, v)
        return before, keys[1, 2] * 2

    x = torch.ones(1, 2, 64, device=device)
    with torch.no_grad():
        before, after = model(x, x, x, keys)
    assert (before == 0).all() and (after == 2).all()


def test_plans_change_without_compiling_again(context, device):
    step = Step(context, device, LENS)
    layer = layer_of(step)
    compiled = torch.compile(lambda q, k, v: layer(q, k, v) * 2, fullgraph=True, dynamic=True)
    with torch.no_grad():
        check(compiled(step.q, *step.new()), 2 * step.expected()[0])
        torch.compiler.set_stance("fail_on_recompile")
        try:
            other = folio.Plan([step.attention], max_seqs=8, max_query_tokens=64, max_seq_len=64, cache=step.cache)
            other.update(step.batch)
            layer.step.plan = other
            check(compiled(step.q, *step.new()), 2 * step.expected()[0])
            rows = sum(n for n, _ in LENS[:3])  # other lengths in the same plan
            k, v = (a[:rows] for a in step.new())
            tables = step.batch.view()
            step.batch.clear()
            for (n, total), start, end in zip(LENS[:3], tables["table_start"], tables["table_start"][1:]):
                step.batch.add(n, total, tables["blocks"][start:end])
            other.update(step.batch)
            check(compiled(step.q[:rows], k, v), 2 * step.expected()[0][:rows])
        finally:
            torch.compiler.set_stance("default")


def test_opcheck(context, device):
    step = Step(context, device, LENS)
    layer = layer_of(step)
    k, v = step.new()
    step.plan.forward(step.q, k, v, cache=step.cache)
    caches = (layer.k_cache, layer.v_cache, layer.key)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    # a copy of the cache would not be the layer's, so the operators are checked without writing k and v
    torch.library.opcheck(torch.ops.folio.forward.default, (step.q, None, None, None, None, layer.key),
                          test_utils=tests)
    torch.library.opcheck(torch.ops.folio.forward_lse.default, (step.q, None, None, None, None, layer.key),
                          test_utils=tests)
    out = torch.empty_like(step.q)
    torch.library.opcheck(torch.ops.folio.forward_out.default, (step.q, None, None, out, None, None, layer.key),
                          test_utils=tests)
    torch.library.opcheck(torch.ops.folio.forward.default, (step.q, k, v, *caches), test_utils="test_faketensor")


def test_fakes_have_the_shapes_of_results(context, device):
    step = Step(context, device, LENS, torch.bfloat16, v_size=32)
    layer = layer_of(step)
    k, v = step.new()
    for q in (step.q, step.q.flatten(1)):
        real = layer.lse(q, k, v)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = layer.lse(mode.from_tensor(q), mode.from_tensor(k), mode.from_tensor(v))
        for a, b in zip(real, fake):
            assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_mutations_are_declared():
    for name, written in (("forward", {"k_cache", "v_cache"}), ("forward_lse", {"k_cache", "v_cache"}),
                          ("forward_out", {"out", "k_cache", "v_cache"})):
        schema = getattr(torch.ops.folio, name).default._schema
        assert {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write} == written


def test_bad_layers_are_rejected(context, device):
    step = Step(context, device, [(1, 5)])
    k, v = step.new()
    other = folio.Attention(context, num_heads=4, num_kv_heads=2, head_size=64)
    with pytest.raises(folio.ArgumentError, match="made without this layer's attention"):
        folio.torch.Layer(folio.torch.Step(step.plan), other, step.cache)(step.q, k, v)
    with pytest.raises(folio.ArgumentError, match="the step has no plan"):
        folio.torch.Layer(folio.torch.Step(), step.attention, step.cache)(step.q, k, v)
    layer = layer_of(step)
    key = layer.key
    del layer
    gc.collect()
    with pytest.raises(folio.ArgumentError, match=f"no folio.torch.Layer with key {key}"):
        torch.ops.folio.forward(step.q, k, v, None, None, key)


def test_cuda_graph_of_device_updates(context, device):
    """A captured step is replayed with other lengths."""
    if device != "cuda":
        pytest.skip("host backends have no graphs")
    step = Step(context, device, [(1, 40), (1, 17), (1, 33)], torch.bfloat16)
    view = step.batch.view()
    tables = torch.full((3, 3), -1, dtype=torch.int32)
    for i in range(3):
        start, end = view["table_start"][i:i + 2]
        tables[i, : end - start] = torch.from_numpy(view["blocks"][start:end])
    tables, lens = tables.to(device), torch.tensor([40, 17, 33], dtype=torch.int32, device=device)
    k, v = step.new()
    step.plan.forward(step.q, k, v, cache=step.cache)  # all slots are written
    plan = folio.Plan(step.attention, max_seqs=3, max_query_tokens=3, max_query_len=1, max_seq_len=48,
                      cache=step.cache, graph=True)
    layer = folio.torch.Layer(folio.torch.Step(plan), step.attention, step.cache)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan.update_device(seq_lens=lens, block_tables=tables)
        layer(step.q)
        with torch.cuda.graph(graph, stream=stream):
            plan.update_device(seq_lens=lens, block_tables=tables)
            out = layer(step.q)
    torch.cuda.synchronize()
    for lengths in ([40, 17, 33], [1, 16, 2], [39, 3, 32]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        keys = [slice(start, start + n) for start, n in zip(step.core.key_starts, lengths)]
        want = [attention(step.core.q[i:i + 1], step.core.k[own], step.core.v[own])[0] for i, own in enumerate(keys)]
        check(out, torch.from_numpy(np.concatenate(want)))
    plan.findings()


# --- there is no backward pass ---

NO_BACKWARD = "no backward pass: call this under torch.no_grad"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_refused(context, device, which):
    """By everything that takes q, k and v, and by the operators themselves."""
    step = Step(context, device, [(1, 5)])
    layer = layer_of(step)
    tensors = [step.q, *step.new()]
    tensors[which] = tensors[which].clone().requires_grad_()
    out = torch.empty_like(step.q)
    calls = [layer, layer.lse, lambda *a: layer(*a, out=out), lambda *a: step.plan.forward(*a, cache=step.cache),
             lambda *a: folio.attend(*a, context=context),
             lambda *a: torch.ops.folio.forward(*a, layer.k_cache, layer.v_cache, layer.key),
             lambda *a: torch.ops.folio.forward_out(*a, out, layer.k_cache, layer.v_cache, layer.key)]
    for call in calls:
        with pytest.raises(folio.UnsupportedError, match=NO_BACKWARD):
            call(*tensors)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call(*tensors)


def test_gradients_are_refused_in_compiled_code(context, device):
    step = Step(context, device, LENS)
    layer = layer_of(step)
    k, v = step.new()
    compiled = torch.compile(lambda q, k, v: layer(q, k, v) * 2, fullgraph=True)
    q = step.q.clone().requires_grad_()
    with pytest.raises(Exception, match="no backward pass|Observed exception"):
        compiled(q, k, v)
    with torch.no_grad():
        check(compiled(q, k, v), 2 * step.expected()[0])
    with torch.inference_mode():
        check(compiled(q, k, v), 2 * step.expected()[0])
    check(compiled(step.q, k, v), 2 * step.expected()[0])  # grad mode, but nothing requires a gradient


def test_merging_refuses_gradients():
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    with pytest.raises(folio.UnsupportedError, match="part 1 requires a gradient"):
        folio.merge_states([(out, lse), (out.clone().requires_grad_(), lse)])


@pytest.mark.slow
def test_attend_in_compiled_code_names_what_works():
    q = torch.randn(4, 2, 64)
    with torch.no_grad():
        with pytest.raises(Exception, match="folio.attend does not compile: use folio.torch.Layer"):
            torch.compile(lambda q: folio.attend(q, q, q) * 2, fullgraph=True)(q)
        out = torch.compile(lambda q: folio.attend(q, q, q) * 2)(q)  # in pieces it works
    assert torch.equal(out, folio.attend(q, q, q) * 2)
