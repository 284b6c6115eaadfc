"""Attention of one sequence in plain NumPy and float64: what the core tests compare with. Not a test itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# How far a result may be off, for numbers of about 1: a few roundings of the result and of the weights.
BOUNDS = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}


def attention(q: Any, k: Any, v: Any, *, causal: bool = True, window: tuple = (-1, -1), scale: Any = None,
              soft_cap: float = 0.0, slopes: Any = None, sinks: Any = None, bias: Any = None,
              first_query: Any = None, first_key: int = 0) -> tuple:
    """(out [rows, heads, v_size], lse [rows, heads]). q [rows, heads, size], k and v [keys, kv_heads, ...]. Row i is at
    position first_query + i; by default the last row is at the last key. bias [heads, rows, keys]."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    start = first_key + len(k) - len(q) if first_query is None else first_query
    rows, keys = np.arange(len(q))[:, None] + start, np.arange(len(k))[None] + first_key
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * abs(rows - keys)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    right = 0 if causal else window[1]
    hidden = np.zeros((len(q), len(k)), bool)
    if right >= 0:
        hidden |= keys > rows + right
    if window[0] >= 0:
        hidden |= keys < rows - window[0]
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        column = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], 2)
    if not scores.shape[2]:
        return np.zeros((len(q), q.shape[1], v.shape[2])), np.full((len(q), q.shape[1]), -np.inf)
    top = scores.max(2, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(2, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, 0) + np.log(total))[..., 0].T
    weights = weights[..., :len(k)] / np.where(total > 0, total, 1)
    return np.einsum("hij,jhd->ihd", weights, v), lse


def rotate(x: np.ndarray, positions: np.ndarray, num_dims: int, theta: float = 10000.0, pairing: str = "halves",
           first_dim: int = 0) -> np.ndarray:
    """x [rows, heads, size] with num_dims numbers of each head, from first_dim on, rotated."""
    half = num_dims // 2
    angles = np.outer(positions, theta ** (-2 * np.arange(half) / num_dims))[:, None, :]
    result = np.array(x, np.float64)
    part = result[..., first_dim:first_dim + num_dims]
    a, b = (part[..., :half], part[..., half:]) if pairing == "halves" else (part[..., 0::2], part[..., 1::2])
    a[...], b[...] = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return result


def random(shape: tuple, dtype: str = "f32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DTYPES[dtype])


def check(got: Any, expected: np.ndarray, dtype: str = "f32", factor: float = 1.0, name: str = "out") -> None:
    """Within the bound of the dtype; equal where not finite."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape, f"{name} has shape {got.shape}, not {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=name)
    scale = max(1.0, abs(expected[finite]).max(initial=0.0))
    error = abs(got - expected)[finite].max(initial=0.0)
    assert error <= BOUNDS[dtype] * scale * factor, f"{name} is off by {error}"
