"""Whole models in vLLM: the greedy tokens with Folio are those with vLLM's own CPU attention, in f32.

All models of one way run in one process. `-m 'not slow'` takes Llama only.
"""

from __future__ import annotations

import pytest
from conftest import checked, prompts
from vllm_models import MODELS, save

TIE = 1e-4  # where the two best logits lie closer than this, the tokens may differ from there on

ENGINE = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=32,
              max_num_batched_tokens=192, block_size=32, enable_prefix_caching=True, enable_chunked_prefill=True)
BERT = dict(runner="pooling", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
            max_num_seqs=32)
WHISPER = dict(dtype="float32", enforce_eager=True, max_model_len=448, max_num_seqs=32)  # vLLM: no prefix cache, no chunks

slow = pytest.mark.slow
NAMES = [pytest.param(name, marks=() if name == "llama" else slow) for name in MODELS]
GENERATING = [p for p in NAMES if p.values[0] != "bert"]


def job(name: str, folder) -> dict:
    model = str(save(name, folder))
    if name == "bert":
        return dict(model=model, engine=BERT, prompts=prompts(32, 200, 5), classify=True)
    if name == "whisper":
        return dict(model=model, engine=WHISPER, prompts=[[3, 10 + i, 50] for i in range(32)], audio=True, max_tokens=24)
    return dict(model=model, engine=ENGINE, prompts=prompts(32, 200, 5), max_tokens=24)


@pytest.fixture(scope="session")
def results(request, folder, run_jobs):
    """results(way): of all models that the chosen tests ask for."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {name: job(name, folder) for name in MODELS if name in wanted}
    found: dict = {}

    def get(way: str) -> dict:
        if way not in found:
            found[way] = run_jobs("models", way, jobs)
        return found[way]

    return get


def compare(want: dict, got: dict) -> int:
    """How many requests differ from a tie on. Fails where they differ without a tie."""
    ties = 0
    for i, (a, b) in enumerate(zip(want["tokens"], got["tokens"])):
        assert len(a) == len(b) > 0
        first = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if first is not None:
            gap = want["gaps"][i][first]
            assert gap <= TIE, f"request {i}: token {first} is {b[first]}, not {a[first]}, and the logits differ by {gap:.1e}"
            ties += 1
    return ties


@pytest.mark.parametrize("name", NAMES)
def test_folio_is_used(results, name):
    assert checked(results("folio"), name)["classes"][-1] == "folio.vllm.impl"
    assert not [c for c in checked(results("own"), name)["classes"] if "folio" in c]
    assert "is vLLM's CPU_ATTN" in results("folio")["log"]
    assert "FOLIO_VLLM is 0" in results("own")["log"]


@pytest.mark.parametrize("name", GENERATING)
def test_tokens(results, name):
    want, got = checked(results("own"), name), checked(results("folio"), name)
    assert len(want["tokens"]) == 32
    ties = compare(want, got)
    print(f"\n{name}: {32 - ties} of 32 requests have equal tokens, {ties} differ from a tie on")


@slow
@pytest.mark.parametrize("name", ["bert"])
def test_probabilities(results, name):
    want, got = checked(results("own"), name)["probs"], checked(results("folio"), name)["probs"]
    worst = max(abs(a - b) for x, y in zip(want, got) for a, b in zip(x, y))
    print(f"\nbert: 32 requests, largest difference of a probability {worst:.1e}")
    assert len(want) == len(got) == 32 and worst < 1e-4
    assert [max(range(16), key=x.__getitem__) for x in want] == [max(range(16), key=x.__getitem__) for x in got]


@pytest.mark.parametrize("name", NAMES)
def test_attention_decides(results, name):
    """Without attention most tokens are others: equal tokens mean something."""
    want, got = checked(results("own"), name), checked(results("zero"), name)
    if name == "bert":
        changed = sum(max(abs(a - b) for a, b in zip(x, y)) > 0.01 for x, y in zip(want["probs"], got["probs"]))
        assert changed > 16
        return
    pairs = [(x, y) for a, b in zip(want["tokens"], got["tokens"]) for x, y in zip(a, b)]
    changed = sum(x != y for x, y in pairs) / len(pairs)
    print(f"\n{name}: without attention {changed:.0%} of the tokens are others")
    assert changed > 0.5


@pytest.mark.parametrize("name", [p for p in GENERATING if p.values[0] != "whisper"])
def test_prefix_cache_was_used(results, name):
    for way in ("own", "folio"):
        assert sum(checked(results(way), name)["cached"]) > 200


@slow
def test_compiled(folder, run_jobs):
    """Not eager: vLLM compiles the model, as is its default, with attention as an opaque operator in it."""
    jobs = {"compiled": {**job("llama", folder), "engine": {**ENGINE, "enforce_eager": False}}}
    want, got = (checked(run_jobs("compiled", way, jobs, TORCHDYNAMO_DISABLE="0"), "compiled") for way in ("own", "folio"))
    ties = compare(want, got)
    print(f"\ncompiled: {32 - ties} of 32 requests have equal tokens, {ties} differ from a tie on")
