"""folio.transformers against transformers' own eager attention: the same tokens from the same models."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import folio  # noqa: E402
import folio.transformers as folio_hf  # noqa: E402
import transformers_models as models  # noqa: E402
from folio.transformers import paged  # noqa: E402

_references: dict = {}


def reference(name: str, device: str) -> tuple:
    """(model, prompts, what eager attention generates), made once."""
    key = (name, device)
    if key not in _references:
        model, ids = models.make_model(name, device), models.prompts()
        models.use(model, name, "eager")
        _references[key] = (model, ids, models.generate(model, name, ids))
    return _references[key]


def slow_but(quick: tuple, names: tuple) -> list:
    """The names as parameters, all but the quick ones marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but((), models.DECODERS + models.ENCODER_DECODERS))
def test_attention_decides(name: str, device: str) -> None:
    """Without attention most tokens are others: so the other tests can fail."""
    model, ids, expected = reference(name, device)
    models.use(model, name, "zero")
    zeroed = models.generate(model, name, ids)
    assert (zeroed.tokens != expected.tokens).float().mean() > 0.5


@pytest.mark.parametrize("name", slow_but(("llama", "falcon", "mpt", "bart"),
                                          models.DECODERS + models.ENCODER_DECODERS))
def test_generate(name: str, device: str) -> None:
    model, ids, expected = reference(name, device)
    models.use(model, name, folio_hf.PLAIN)
    got = models.generate(model, name, ids)
    models.compare(expected, got.tokens, logits=got.logits)


@pytest.mark.parametrize("name", slow_but((), ("llama", "mistral", "gemma2", "gpt_oss", "falcon_new", "mpt", "bart")))
def test_generate_static_cache(name: str, device: str) -> None:
    model, ids, expected = reference(name, device)
    models.use(model, name, folio_hf.PLAIN)
    got = models.generate(model, name, ids, cache_implementation="static", disable_compile=True)
    models.compare(expected, got.tokens, logits=got.logits)


@pytest.mark.parametrize("name", slow_but(("llama",), models.BATCHED))
def test_generate_batch(name: str, device: str) -> None:
    """Steps of 48 tokens: prompts are cut, and share steps with decodes."""
    model, ids, expected = reference(name, device)
    models.use(model, name, folio_hf.BATCHING)
    got = models.generate_batch(model, ids, num_blocks=256, max_batch_tokens=48)
    models.compare(expected, got.tokens, logprobs=got.logprobs)


@pytest.mark.parametrize("name", slow_but(("llama",), models.BATCHED))
def test_generate_batch_with_eviction(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few blocks that requests lose theirs and are computed again."""
    model, ids, expected = reference(name, device)
    steps = []
    plain_tables = paged.tables

    def counting(pages: paged.Pages, trash: int, query_start: object, *rest: object) -> paged.Tables:
        steps.append(int(query_start[-1]))
        return plain_tables(pages, trash, query_start, *rest)

    monkeypatch.setattr(paged, "tables", counting)
    models.use(model, name, folio_hf.BATCHING)
    got = models.generate_batch(model, ids, num_blocks=5 if name.startswith("mistral") else 14, max_batch_tokens=64)
    models.compare(expected, got.tokens, logprobs=got.logprobs)
    groups = len(set(getattr(model.config, "layer_types", None) or [0]))
    needed = sum(map(len, ids)) + len(ids) * (models.NEW_TOKENS - 1)
    assert sum(steps) > groups * needed, "nothing was evicted"


@pytest.mark.slow
def test_generate_batch_long_pages(device: str) -> None:
    """Pages of 256 tokens, as by default; windows are shorter than a page."""
    for name in ("llama", "mistral", "gpt_oss"):
        model, ids, expected = reference(name, device)
        models.use(model, name, folio_hf.BATCHING)
        got = models.generate_batch(model, ids, num_blocks=32, max_batch_tokens=128, page=256)
        models.compare(expected, got.tokens, logprobs=got.logprobs)


@pytest.mark.slow
def test_shared_prefix_and_forks(device: str) -> None:
    """Blocks of a common prefix are shared, those of forks copied."""
    model = reference("llama", device)[0]
    first = models.prompts((40,), seed=5)[0]
    ids = [first + tail for tail in ([7, 8], [9], [7, 8, 9, 10])]
    models.use(model, "llama", "eager")
    expected = models.generate(model, "llama", ids)
    models.use(model, "llama", folio_hf.BATCHING)
    got = models.generate_batch(model, ids, num_blocks=256, max_batch_tokens=64, return_sequences=2)
    for fork in (0, 1):
        rows = _rows_of(expected.tokens, got.tokens, fork)
        models.compare(expected, got.tokens[rows], logprobs=got.logprobs[rows])


def _rows_of(expected: torch.Tensor, got: torch.Tensor, fork: int) -> list[int]:
    """For each request the row of its fork: results come in any order, and forks of one request are equal."""
    rows = []
    for tokens in expected:
        same = (got == tokens).float().mean(1)
        rows.append(int(same.argsort(descending=True)[fork]))
    return rows


@pytest.mark.slow
def test_bf16(device: str) -> None:
    """bf16 models run; the first tokens' logits agree with f32 about as well as those of eager attention do."""
    model = models.make_model("llama", device)
    ids = models.prompts()
    models.use(model, "llama", "eager")
    exact = models.generate(model, "llama", ids).logits[:, 0]
    model = model.to(torch.bfloat16)
    eager = models.generate(model, "llama", ids).logits[:, 0]
    models.use(model, "llama", folio_hf.PLAIN)
    plain = models.generate(model, "llama", ids).logits[:, 0]
    assert (plain - exact).abs().mean() < 1.3 * (eager - exact).abs().mean() + 1e-3
    models.use(model, "llama", folio_hf.BATCHING)
    batched = models.generate_batch(model, ids, num_blocks=64, max_batch_tokens=256)
    assert (batched.tokens[:, 0] == exact.argmax(-1)).float().mean() >= 0.5


def test_plain_name_refused_for_batching_call(device: str) -> None:
    model, ids, _ = reference("llama", device)
    models.use(model, "llama", folio_hf.BATCHING)
    with pytest.raises(folio.UnsupportedError, match='for forward and generate use "folio"'):
        with torch.no_grad():
            model(torch.tensor(ids[:1], device=device))


def test_gradients_refused(device: str) -> None:
    model, ids, _ = reference("llama", device)
    models.use(model, "llama", folio_hf.PLAIN)
    with pytest.raises(folio.UnsupportedError, match="no gradients"):
        model(torch.tensor(ids[:1], device=device))


def test_unequal_head_sizes_refused_in_batching() -> None:
    """The paged cache of transformers has one head size for K and V, DeepSeek-V3 has two. It is refused at once: an
    error in the thread of continuous batching is only logged."""
    model = models.make_model("deepseek_v3", "cpu")
    with pytest.raises(folio.UnsupportedError, match="heads of 24 and values of 16; .* room for one size only"):
        model.set_attn_implementation(folio_hf.BATCHING)
    model.set_attn_implementation(folio_hf.PLAIN)


@pytest.mark.parametrize("kind", ["StableLm", "Nemotron"])
def test_models_without_a_step_refused_in_batching(kind: str) -> None:
    """Their layers do not pass the cache of continuous batching on to their attention."""
    config = getattr(transformers, kind + "Config")(**models.SHAPE, num_key_value_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(folio.UnsupportedError, match=f"{kind.lower()} model.* use folio.transformers.PLAIN with gen"):
        model.set_attn_implementation(folio_hf.BATCHING)
    model.set_attn_implementation(folio_hf.PLAIN)


@pytest.mark.parametrize("name", models.PATCHED)
def test_patched_without_padding(name: str, device: str) -> None:
    """Where transformers would make no mask."""
    model, ids = models.make_model(name, device), torch.tensor(models.prompts((33,)), device=device)
    logits = {}
    for implementation in ("eager", "folio"):
        models.use(model, name, implementation)
        with torch.no_grad():
            logits[implementation] = model(ids).logits
    assert (logits["eager"] - logits["folio"]).abs().max() < 2e-3


def test_patch() -> None:
    """patch and restore, and which models they refuse."""
    model = models.make_model("bloom", "cpu")
    before = model.config._attn_implementation
    assert folio_hf.patch(folio_hf.patch(model)) is model
    assert model.config._attn_implementation == folio_hf.PLAIN != before
    folio_hf.restore(model)
    assert model.config._attn_implementation == before
    with pytest.raises(folio.ArgumentError, match="LlamaForCausalLM is not a BLOOM, Falcon or MPT model"):
        folio_hf.patch(models.make_model("llama", "cpu"))


def test_other_versions_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import PagedAttentionCache

    assert folio_hf.interface() in ("5.17", "5.18", "5.19")
    monkeypatch.setattr(PagedAttentionCache, "update", lambda self, k, v: None)
    assert folio_hf.interface() is None
    monkeypatch.setattr(folio_hf, "_batching", None)
    with pytest.raises(folio.UnsupportedError, match=f"transformers {transformers.__version__} is not supported"):
        folio_hf.BATCHING


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_flash_attn_needed() -> None:
    """Choosing the implementation imports no flash_attn, and needs no kernels of the hub."""
    _run("""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("flash_attn", "flash_attn_interface", "kernels"):
                    raise AssertionError(f"{name} is imported")

        import transformers
        import folio.transformers as folio_hf
        config = transformers.GptOssConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                           num_key_value_heads=1, head_dim=16, num_local_experts=2, vocab_size=40,
                                           intermediate_size=32, num_experts_per_tok=1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        sys.meta_path.insert(0, Refuse())
        model.set_attn_implementation(folio_hf.BATCHING)
        assert model.config._attn_implementation == folio_hf.BATCHING
        """)


@pytest.mark.slow
def test_no_second_pool_of_threads() -> None:
    """Attention runs on torch's threads: the process gets no more of them."""
    _run("""
        import os
        import torch
        import transformers.models.bloom.modeling_bloom

        torch.set_num_threads(4)
        threads = lambda: len(os.listdir("/proc/self/task"))
        x = torch.randn(512, 512)
        for _ in range(3):
            (x @ x).relu().sum()
            torch.softmax(torch.randn(512, 512, 64), -1)
        before = threads()
        import folio.transformers
        q = torch.randn(4, 8, 256, 64)
        module = torch.nn.Module()
        for _ in range(3):
            folio.transformers.plain.plain_attention(module, q, q[:, :2], q[:, :2], None)
        assert threads() == before, (before, threads())
        """)
