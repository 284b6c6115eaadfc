"""examples/engine.c against PyTorch: the same random weights, the same tokens, the model in float64.

usage: engine_torch.py FILE      FILE is what `engine FILE` wrote

The engine's sizes and its random numbers are written down here a second time, on purpose: the two
share no code. Every logit must agree, and every token must be the one with the largest logit.
"""
import sys

import numpy as np
import torch

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, D, FFN = 96, 64, 2, 8, 2, 16, 96
REQUESTS, MAX_LEN, NEW_TOKENS = 16, 48, 12
TOLERANCE = 2e-5  # of the largest logit: f32 in the engine, f64 here

torch.set_default_dtype(torch.float64)


class Weights:
    """Numbers that depend on their places only, as make_model makes them."""

    def __init__(self):
        self.place = 1

    def take(self, *shape):
        n = int(np.prod(shape))
        x = np.arange(self.place, self.place + n, dtype=np.uint64) * 0x9E3779B9 & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        self.place += n
        return torch.from_numpy(((x ^ (x >> 16)) >> 8) / 8388608.0 - 1.0).reshape(shape) * 0.75


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x):  # [len, heads, D]
    i = torch.arange(D // 2)
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-2.0 * i / D)
    c, s = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((a * c - b * s, a * s + b * c), -1)


def make_model():
    w = Weights()
    model = {
        "embedding": w.take(VOCAB, DIM),
        "norm": w.take(DIM),
        "head": w.take(DIM, VOCAB),
    }
    model["layers"] = [
        {
            "norm": w.take(DIM),
            "q": w.take(DIM, HEADS * D),
            "k": w.take(DIM, KV_HEADS * D),
            "v": w.take(DIM, KV_HEADS * D),
            "o": w.take(HEADS * D, DIM),
            "ffn_norm": w.take(DIM),
            "gate": w.take(DIM, FFN),
            "up": w.take(DIM, FFN),
            "down": w.take(FFN, DIM),
        }
        for _ in range(LAYERS)
    ]
    return model


def run(model, tokens):
    """Logits [len, VOCAB] of one sequence, all at once."""
    x = model["embedding"][tokens]
    n = len(tokens)
    hidden = torch.triu(torch.full((n, n), -torch.inf), 1)
    for w in model["layers"]:
        h = rms_norm(x, w["norm"])
        q = rotate((h @ w["q"]).reshape(n, HEADS, D))
        k = rotate((h @ w["k"]).reshape(n, KV_HEADS, D)).repeat_interleave(HEADS // KV_HEADS, 1)
        v = (h @ w["v"]).reshape(n, KV_HEADS, D).repeat_interleave(HEADS // KV_HEADS, 1)
        p = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / D**0.5 + hidden, -1)
        x = x + torch.einsum("hqk,khd->qhd", p, v).reshape(n, HEADS * D) @ w["o"]
        h = rms_norm(x, w["ffn_norm"])
        x = x + (torch.nn.functional.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return rms_norm(x, model["norm"]) @ model["head"]


def main():
    record = np.dtype(
        [
            ("arrival", "i4"),
            ("prompt_len", "i4"),
            ("len", "i4"),
            ("tokens", "i4", MAX_LEN),
            ("logits", "f4", (NEW_TOKENS, VOCAB)),
            ("padding", "i4"),  # the next field is aligned to 8 bytes
        ]
    )
    requests = np.fromfile(sys.argv[1], record)
    assert len(requests) == REQUESTS, f"{len(requests)} requests in the file, not {REQUESTS}"
    model = make_model()
    worst = 0.0
    for number, r in enumerate(requests):
        first, end = int(r["prompt_len"]), int(r["prompt_len"]) + NEW_TOKENS
        tokens = torch.from_numpy(r["tokens"][:end].astype(np.int64))
        expected = run(model, tokens[:-1])[first - 1 :]
        got = torch.from_numpy(r["logits"].astype(np.float64))
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, error)
        if not error <= TOLERANCE:
            sys.exit(f"request {number}: logits differ by {error:.2e} of the largest, {TOLERANCE:.0e} is allowed")
        if not torch.equal(got.argmax(-1), tokens[first:]):
            sys.exit(f"request {number}: a token is not the one with the largest logit")
    print(f"engine: {REQUESTS} requests, {REQUESTS * NEW_TOKENS} rows of logits agree, worst at {worst:.1e} of the largest")


if __name__ == "__main__":
    main()
