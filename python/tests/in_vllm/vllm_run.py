"""Runs jobs in vLLM, in this process: python vllm_run.py JOBS.json RESULTS.json. Started by the tests, once for each way.

ATTENTION=folio   as vLLM finds it installed
ATTENTION=own     vLLM's own attention, by FOLIO_VLLM=0
ATTENTION=zero    the same with attention's output set to zero, to see that attention decides the tokens
"""

from __future__ import annotations

import json
import os
import sys

WAY = os.environ["ATTENTION"]
os.environ["FOLIO_VLLM"] = "1" if WAY == "folio" else "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def zero_attention() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl

    forward = Impl.forward

    def zeroed(*args, **kwargs):
        return forward(*args, **kwargs).zero_()

    Impl.forward = zeroed


def attention_classes(llm) -> list:
    """The classes of the attention layers, where the engine runs in this process."""
    try:
        config = llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        return sorted({f"{type(layer.impl).__mro__[1].__module__}" for layer in layers if hasattr(layer, "impl")})
    except AttributeError:
        return []


def prompts_of(job: dict) -> list:
    import numpy as np

    if job.get("audio"):
        return [{"prompt_token_ids": ids, "multi_modal_data": {"audio": (np.random.default_rng(i).standard_normal(
            2000 + 700 * i).astype(np.float32), 16000)}} for i, ids in enumerate(job["prompts"])]
    return [{"prompt_token_ids": ids} for ids in job["prompts"]]


def run(job: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model=job["model"], **job["engine"])
    try:
        if job.get("classify"):
            outputs = llm.classify(prompts_of(job), use_tqdm=False)
            return {"probs": [list(o.outputs.probs) for o in outputs], "classes": attention_classes(llm)}
        sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], logprobs=2, detokenize=False,
                                  ignore_eos=True)
        outputs = llm.generate(prompts_of(job), sampling, use_tqdm=False)
        best = [[sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in o.outputs[0].logprobs]
                for o in outputs]
        return {"tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "gaps": [[a - b for a, b in steps] for steps in best],
                "cached": [o.num_cached_tokens for o in outputs], "classes": attention_classes(llm)}
    finally:
        del llm
        cleanup_dist_env_and_memory()


def main() -> None:
    if WAY == "zero":
        zero_attention()
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    results = {}
    for name, job in jobs.items():
        try:
            results[name] = run(job)
        except BaseException as error:  # the other jobs' results are still wanted
            import traceback

            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
