"""Attention of one sequence in plain torch and float64: what the tests compare with. Not a test itself."""

from __future__ import annotations

import math

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def attention(q, k, v, *, causal=True, window=(-1, -1), scale=None, soft_cap=0.0, slopes=None, sinks=None,
              first_pos=None):
    """(out [rows, heads, v_size], lse [rows, heads]) in float64. q [rows, heads, size], k and v [keys, kv_heads, ...].
    Row i is at position first_pos + i; the default puts the last row at the last key."""
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows = torch.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0] if first_pos is None else first_pos)
    keys = torch.arange(k.shape[0])[None]
    if slopes is not None:
        scores = scores - slopes.double().cpu()[:, None, None] * (rows - keys).abs()
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    right = 0 if causal else window[1]
    if right >= 0:
        hidden |= keys > rows + right
    if window[0] >= 0:
        hidden |= keys < rows - window[0]
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().cpu()[:, None, None].expand(-1, q.shape[0], 1)], 2)
    lse = torch.logsumexp(scores, 2)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hij,jhd->ihd", weights, v), lse.T


def bound(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def check(out, expected, name: str = "out") -> None:
    """out within the budget of its dtype; equal where not finite."""
    got = out.double().cpu()
    assert got.shape == expected.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    finite = torch.isfinite(expected)
    assert torch.equal(got[~finite], expected[~finite]), f"{name} differs where it is not finite"
    error = (got - expected)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound(out.dtype) * max(1.0, expected[finite].abs().max().item() if finite.any() else 1.0), \
        f"{name} is off by {error}"
