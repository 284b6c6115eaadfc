"""Two processes on one machine: tensor parallel and pipeline parallel. Each has one core and its part of the KV cache."""

from __future__ import annotations

import pytest
from conftest import checked, prompts
from test_models import ENGINE, compare
from vllm_models import save

# vLLM 0.32 runs pipelines only if its model is traced: the eager mode makes no tensors for what goes between the stages.
WAYS = {"tensor": dict(tensor_parallel_size=2),
        "pipeline": dict(pipeline_parallel_size=2, enforce_eager=False, compilation_config={"mode": 2, "backend": "eager"})}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "0"}


@pytest.fixture(scope="module")
def results(folder, run_jobs):
    model = str(save("llama", folder))
    jobs = {name: dict(model=model, engine={**ENGINE, **options, "distributed_executor_backend": "mp"},
                       prompts=prompts(32, 200, 5), max_tokens=24) for name, options in WAYS.items()}
    return {way: run_jobs("parallel", way, jobs, **ENVIRONMENT) for way in ("folio", "own")}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens(results, way):
    want, got = checked(results["own"], way), checked(results["folio"], way)
    ties = compare(want, got)
    print(f"\n{way} parallel: {32 - ties} of 32 requests have equal tokens, {ties} differ from a tie on")
    assert sum(got["cached"]) > 200


@pytest.mark.slow
def test_folio_is_used_in_each_process(results):
    lines = [line for line in results["folio"]["log"].splitlines() if "is vLLM's CPU_ATTN" in line]
    assert sum("VllmWorker-" in line for line in lines) == 2 * len(WAYS)
