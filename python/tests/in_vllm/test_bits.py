"""The output of attention for a request has the same bits alone, among others, and in chunks of any size.

End to end, vLLM's matrix products still vary with the batch: the same tokens follow from this only where those agree.
"""

from __future__ import annotations

import pytest
import torch

from folio.vllm.selfcheck import Folio, Own, Problem

LENGTH = 1500
SHAPE = dict(num_heads=8, num_kv_heads=2, head_size=64)
CHUNKS = {"halves": [750, 750], "blocks": [160] * 9 + [60], "odd": [1, 7, 129, 63, 300, 1000], "decodes": [1494] + [1] * 6}


def pieces(cls, request: tuple, chunks: list, others: list, dtype) -> torch.Tensor:
    """The output of all rows of the request, computed in steps of so many tokens; the others are in each step."""
    out, done = [], 0
    for step, count in enumerate(chunks):
        run = cls(Problem(queries=[count] + [q for q, _ in others], context=[done] + [c for _, c in others], dtype=dtype,
                          seed=step, sequences=[request] + [None] * len(others), **SHAPE))
        out.append(run.forward(run.build())[:count].clone())
        done += count
    assert done == LENGTH
    return torch.cat(out)


def ways(cls, dtype) -> dict:
    request = Problem(queries=[1], context=[0], dtype=dtype, **SHAPE).random_sequence(LENGTH, 99)
    others = [(1 + 37 * i % 60 if i % 3 == 0 else 1, 40 * i) for i in range(31)]
    results = {"alone": pieces(cls, request, [LENGTH], [], dtype), "among 31": pieces(cls, request, [LENGTH], others, dtype)}
    for name, chunks in CHUNKS.items():
        results[name] = pieces(cls, request, chunks, [], dtype)
    for name in ("odd", "decodes"):
        results[f"{name}, among 31"] = pieces(cls, request, CHUNKS[name], others, dtype)
    return results


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_same_bits(dtype):
    results = ways(Folio, dtype)
    for name, out in results.items():
        assert torch.equal(out, results["alone"]), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_own_operator_has_other_bits(dtype):
    """So the test above can fail. If this one fails, vLLM's operator has become invariant."""
    results = ways(Own, dtype)
    rows = {name: int((out != results["alone"]).flatten(1).any(1).sum()) for name, out in results.items()}
    print(f"\nvLLM's own operator, {dtype}: rows of {LENGTH} with other bits than alone: {rows}")
    assert any(rows.values())
