"""Continuous batching of transformers: Folio beside transformers' own sdpa, on the CPU or on a GPU.

    python bench/transformers_batching.py                   # 32 requests of 200 to 2000 tokens, bf16 and f32
    python bench/transformers_batching.py --device cuda     # the same on a GPU
    python bench/transformers_batching.py --requests 4 --repeats 1 --dtypes bf16
    python bench/transformers_batching.py --cpu-time        # one thread and its CPU time, for a machine that is busy

A random Llama of 4 layers, 2048 wide, 32 query and 8 kv heads of 64. Each measurement is a process of its own, which
gives its peak memory (above that of the model); the two implementations alternate. Attention is timed inside its
function, which in both cases stores K and V, too. Figures are medians, with the lowest and highest in brackets. A busy
machine makes them worthless, but for --cpu-time: the load is printed with them. On a GPU the clock is read when the
GPU is idle, before and after each call of attention, and memory is what torch allocated at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PAGE = 256
LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCAB = 4, 2048, 32, 8, 4096, 4096


def prompt_lens(requests: int) -> list[int]:
    """From 200 to 2000, mixed."""
    lens = [200 + 1800 * i // max(requests - 1, 1) for i in range(requests)]
    return [lens[(i * 7) % requests] for i in range(requests)] if requests % 7 else lens


def memory(what: str) -> int:
    """Bytes that this process has in memory: "VmRSS" now, "VmHWM" at most since reset_peak()."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what + ":"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as refs:
        refs.write("5")


def measure(options: argparse.Namespace) -> dict:
    """One run of one implementation, in this process."""
    import torch
    import transformers
    from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import folio.transformers as folio_hf

    transformers.logging.set_verbosity_error()
    own = folio_hf.interface() == "5.17" and "paged|sdpa" or "sdpa"
    name = folio_hf.BATCHING if options.one == "folio" else own
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=64, vocab_size=VOCAB,
                         max_position_embeddings=8192, eos_token_id=None)
    torch.set_default_dtype({"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype])
    model = LlamaForCausalLM(config).eval().to(options.device)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    is_cuda = options.device == "cuda"

    def clock() -> float:
        if is_cuda:
            torch.cuda.synchronize()
        return time.process_time() if options.cpu_time else time.perf_counter()

    spent = {"attention": 0.0, "tokens": 0}
    function = ALL_ATTENTION_FUNCTIONS[name]

    def timed(module: torch.nn.Module, query: torch.Tensor, *args: object, **kwargs: object) -> tuple:
        begin = clock()
        result = function(module, query, *args, **kwargs)
        spent["attention"] += clock() - begin
        spent["tokens"] += query.shape[2] if module.layer_idx == 0 else 0
        return result

    AttentionInterface.register(name, timed)
    model.set_attn_implementation(name)
    ids = [torch.randint(3, VOCAB, (n,)).tolist() for n in prompt_lens(options.requests)]

    def run(inputs: list, new_tokens: int) -> dict:
        blocks = sum(-(-(len(i) + new_tokens) // PAGE) for i in inputs) + 2
        page = {"block_size" if folio_hf.interface() == "5.17" else "page_size": PAGE}
        batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=options.batch_tokens, **page)
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        return model.generate_batch(inputs, generation_config=generation, continuous_batching_config=batching,
                                    progress_bar=False)

    run([ids[0][:64]], 2)
    reset_peak()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if is_cuda else memory("VmRSS")
    spent.update(attention=0.0, tokens=0)
    begin = clock()
    results = run(ids, options.new_tokens)
    total = clock() - begin
    peak = torch.cuda.max_memory_allocated() if is_cuda else memory("VmHWM")
    return {"versions": f"transformers {transformers.__version__}, torch {torch.__version__}", "total": total,
            "threads": torch.get_num_threads(), "memory": peak - base,
            "out": [r.generated_tokens for r in results.values()], **spent}


def spread(values: list[float], unit: float = 1.0) -> str:
    low, high = min(values) * unit, max(values) * unit
    middle = statistics.median(values) * unit
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=512, help="most tokens in a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", default="bf16,f32")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread in place of time")
    parser.add_argument("--one", choices=("folio", "sdpa"), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    if options.one:
        print(json.dumps(measure(options)))
        return
    for dtype in options.dtypes.split(","):
        runs: dict[str, list[dict]] = {"folio": [], "sdpa": []}
        for _ in range(options.repeats):
            for one in runs:
                command = [sys.executable, os.path.abspath(__file__), "--one", one, "--dtype", dtype]
                for option in ("requests", "new_tokens", "batch_tokens", "threads", "device"):
                    if getattr(options, option):
                        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
                command += ["--cpu-time"] if options.cpu_time else []
                environment = os.environ | ({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      env=environment)
                if done.returncode:
                    raise SystemExit(done.stderr)
                runs[one].append(json.loads(done.stdout.splitlines()[-1]))
        report(dtype, options.device, runs, "CPU time" if options.cpu_time else "time")


def report(dtype: str, device: str, runs: dict[str, list[dict]], clock: str) -> None:
    first = runs["folio"][0]
    same = statistics.mean(float(a == b) for x, y in zip(first["out"], runs["sdpa"][0]["out"]) for a, b in zip(x, y))
    print(f"{dtype}, {device}: {len(first['out'])} requests, {first['tokens']} tokens, {first['threads']} threads, "
          f"{first['versions']}, {clock}, load {os.getloadavg()[0]:.1f}, {100 * same:.1f} % of tokens equal")
    print("| | attention, s | tokens/s in attention | all, s | tokens/s | peak memory, MB |")
    print("|---|---|---|---|---|---|")
    for one, results in runs.items():
        print(f"| {one} | {spread([r['attention'] for r in results])} "
              f"| {spread([r['tokens'] / r['attention'] for r in results])} | {spread([r['total'] for r in results])} "
              f"| {spread([r['tokens'] / r['total'] for r in results])} "
              f"| {spread([r['memory'] for r in results], 1e-6)} |")
    ratios = {what: statistics.median(a[what] / b[what] for a, b in zip(runs["sdpa"], runs["folio"]))
              for what in ("attention", "total")}
    peaks = [statistics.median(r["memory"] for r in runs[one]) for one in ("folio", "sdpa")]
    print(f"attention {ratios['attention']:.1f} x, all {ratios['total']:.2f} x, memory {peaks[0] / peaks[1]:.2f} x\n",
          flush=True)


if __name__ == "__main__":
    main()
