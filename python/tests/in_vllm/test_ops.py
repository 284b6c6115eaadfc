"""Folio's builder and layer beside vLLM's own CPU operator, on the same q, k, v and tables."""

from __future__ import annotations

import pytest
import torch
import torch_math

from folio.vllm.selfcheck import Folio, Own, Problem, difference

MIXED = dict(queries=[1, 40, 1, 9, 1, 130], context=[70, 0, 5, 33, 300, 31])
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LIMIT = {F32: 3e-6, BF16: 1.6e-2, F16: 2e-3}


def exact(p: Problem) -> torch.Tensor:
    """Attention in float64 over K and V as an fp8 cache stores them, rounded to nearest."""
    kind = torch.float8_e5m2 if p.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    stored = [[(x.float() / scale).to(kind).double() * scale for x in rows]
              for rows, scale in ((p.keys, p.k_scale), (p.values, p.v_scale))]
    return torch.cat([torch_math.attention(q, k, v)[0] for q, k, v in zip(p.q.split(p.queries), *stored)])


@pytest.fixture(scope="module", autouse=True)
def platform():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)], ids=str)
def test_dtypes_and_shapes(dtype, head_size, heads):
    problem = Problem(**MIXED, dtype=dtype, head_size=head_size, num_heads=heads[0], num_kv_heads=heads[1])
    assert difference(problem) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 96, 128])
def test_block_sizes(dtype, block_size):
    assert difference(Problem(**MIXED, dtype=dtype, block_size=block_size)) <= LIMIT[dtype]


OPTIONS = {
    "window": dict(sliding_window=48),
    "window_1": dict(sliding_window=1),
    "soft_cap": dict(logits_soft_cap=2.0),
    "alibi": dict(alibi_slopes=[0.5, 0.25, 0.125, 0.0625]),
    "sinks": dict(sinks=torch.tensor([1.0, -2.0, 3.0, 0.5])),
    "all": dict(sliding_window=40, logits_soft_cap=5.0, sinks=torch.tensor([1.0, -2.0, 3.0, 0.5])),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(dtype, name):
    problem = Problem(**MIXED, dtype=dtype, options=OPTIONS[name])
    assert difference(problem) <= LIMIT[dtype]
    plain = Folio(Problem(**MIXED, dtype=dtype))
    changed = Folio(problem)
    assert not torch.equal(plain.forward(plain.build()), changed.forward(changed.build()))  # the option does something


def test_sinks_in_bf16():
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5])
    exact, rounded = (Folio(Problem(**MIXED, dtype=BF16, options=dict(sinks=s))) for s in (sinks, sinks.bfloat16()))
    assert torch.equal(exact.forward(exact.build()), rounded.forward(rounded.build()))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("causal", [False, torch.tensor([True, False, True, False, True, False])], ids=["none", "some"])
def test_causality(causal, window):
    problem = Problem(**MIXED, causal=causal, options=dict(sliding_window=window))
    assert difference(problem) <= LIMIT[F32]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_fp8(dtype, kind):
    """Against float64: vLLM's own operator does not round K and V to nearest, and is off by a whole step of fp8."""
    problem = Problem(**MIXED, dtype=dtype, kv_cache_dtype=kind, k_scale=0.5, v_scale=2.0)
    folio, own, want = Folio(problem), Own(problem), exact(problem)
    error, own_error = ((x.forward(x.build()).double() - want).abs().max() for x in (folio, own))
    assert error <= (2e-6 if dtype == F32 else 2e-2)
    assert own_error > 0.1  # if this fails, vLLM rounds now: compare with it


def test_steps_alternate():
    """A builder whose metadata are used in turn, as by a model that drafts."""
    folio = Folio(Problem(**MIXED))
    first = folio.forward(folio.build()).clone()
    other = folio.build()
    other.causal = False
    assert not torch.equal(folio.forward(other), first)
    assert torch.equal(folio.forward(folio.build()), first)


def test_padding_rows_stay():
    """vLLM may give more rows than the step has tokens."""
    folio = Folio(Problem(**MIXED))
    want = folio.forward(folio.build()).clone()
    p = folio.problem
    more = [torch.cat([x, torch.full_like(x[:3], float("nan"))]) for x in (p.q, p.k, p.v)]
    out = torch.full_like(more[0], 7.0)
    folio.impl.forward(folio.layer, *more, folio.kv, folio.build(), out)
    assert torch.equal(out[:-3], want) and (out[-3:] == 7.0).all()


def test_own_operator_can_differ():
    """The comparison can fail: another scale of K is seen."""
    own, folio = Own(Problem(**MIXED)), Folio(Problem(**MIXED, seed=1))
    assert (own.forward(own.build()) - folio.forward(folio.build())).abs().max() > 0.1
