"""What rows cost the CPU kernels: the same attention over K and V in the native format and over rows.

    python bench/cache_rows.py

Caches of transformers are rows. Over continuous batching Folio keeps its native format inside their pages instead
(folio/transformers/paged.py); this is what that is worth. One thread, CPU time, the least of several runs: so figures
hold on a machine that others use, too. 32 query and 8 kv heads of 64.

    native    pages of 256 tokens in the library's format: continuous batching with Folio
    rows      [page, token, head, size], pages of 256 tokens: the same tensors as transformers fills them
    slots     the same rows by lists of slots, as transformers describes them
    heads     [sequence, head, token, size]: the plain interface
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import folio

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 64, 256
CASES = {"32 decodes over 1024": (32, 1, 1024), "1 decode over 4096": (1, 1, 4096),
         "prompt of 1024": (1, 1024, 1024), "4 x 256 rows over 1024": (4, 256, 1024)}
LAYOUTS = ("native", "rows", "slots", "heads")


def cache_of(context: folio.Context, layout: str, tokens: int, length: int, dtype: torch.dtype) -> folio.KVCache:
    if layout == "native":
        memory = torch.randn(2 * tokens * KV_HEADS * SIZE).to(dtype)
        return folio.KVCache.wrap([memory], context=context, layout="native", block_size=PAGE, num_kv_heads=KV_HEADS,
                                  head_size=SIZE, num_blocks=tokens // PAGE)
    shape = {"rows": (tokens // PAGE, PAGE, KV_HEADS, SIZE), "slots": (tokens, 1, KV_HEADS, SIZE),
             "heads": (tokens // length, KV_HEADS, length, SIZE)}[layout]
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    return folio.KVCache.wrap([k], [v], context=context, layout="hnd" if layout == "heads" else "nhd")


def measure(context: folio.Context, layout: str, case: tuple, dtype: torch.dtype, repeats: int) -> float:
    """Milliseconds of CPU time of one layer."""
    seqs, queries, length = case
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    cache = cache_of(context, layout, seqs * length, length, dtype)
    attention = folio.Attention(context, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=name)
    plan = folio.Plan(attention, max_seqs=seqs, max_query_tokens=seqs * queries, max_seq_len=length, cache=cache)
    batch = folio.Batch(cache=cache)
    tables = np.random.default_rng(0).permutation(cache.num_blocks).astype(np.int32)  # as after many requests
    batch.set_block_tables(tables.reshape(seqs, -1), np.full(seqs, length), np.arange(seqs + 1) * queries)
    plan.update(batch)
    q = torch.randn(seqs * queries, HEADS, SIZE).to(dtype)
    out = torch.empty_like(q)
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        plan.forward(q, cache=cache, out=out)
        times.append(time.thread_time() - begin)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    context = folio.Context("cpu", threads=1)
    print(f"{context}, ms of CPU time (times native)\n")
    print("| dtype | case | " + " | ".join(LAYOUTS) + " |\n|---|---|" + "---|" * len(LAYOUTS))
    for dtype in (torch.bfloat16, torch.float32):
        for name, case in CASES.items():
            times = [measure(context, layout, case, dtype, options.repeats) for layout in LAYOUTS]
            cells = [f"{t:.2f} ({t / times[0]:.2f})" for t in times]
            print(f"| {str(dtype)[6:]} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
