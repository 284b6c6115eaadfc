"""Small models with random weights, for the tests of folio.transformers, and the comparison of what they generate."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import transformers
from transformers import AttentionInterface, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import folio.transformers as folio_hf

VOCAB, LAYERS, NEW_TOKENS = 199, 4, 64
PROMPT_LENS = (5, 17, 33, 50, 3, 64)
CLOSE = 1e-4  # tokens may first differ only where the two best logits of the reference are this close
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
         "num_attention_heads": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None, "tie_word_embeddings": False}


def _config(name: str) -> Any:
    if name == "llama":
        return transformers.LlamaConfig(**SHAPE, num_key_value_heads=2)
    if name == "mistral":
        return transformers.MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=32)
    if name == "mistral24":  # a window that is no multiple of 16 and no divisor of a page
        return transformers.MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=24)
    if name == "gemma2":
        return transformers.Gemma2Config(**SHAPE, num_key_value_heads=4, head_dim=16, sliding_window=32,
                                         query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
                                         final_logit_softcapping=None)
    if name == "gpt_oss":
        return transformers.GptOssConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=16,
                                         num_local_experts=4, num_experts_per_tok=2)
    if name == "deepseek_v3":
        return transformers.DeepseekV3Config(**SHAPE, num_key_value_heads=8, q_lora_rank=24, kv_lora_rank=32,
                                             qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
                                             n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
                                             topk_group=1, first_k_dense_replace=2, moe_intermediate_size=32)
    if name == "bloom":
        return transformers.BloomConfig(vocab_size=VOCAB, hidden_size=96, n_layer=LAYERS, n_head=12, pad_token_id=0,
                                        bos_token_id=1, eos_token_id=None)
    if name.startswith("falcon"):  # one kv head and rotary; two kv heads and rotary; ALiBi
        kinds = {"falcon": {}, "falcon_new": {"new_decoder_architecture": True, "num_kv_heads": 2},
                 "falcon_alibi": {"alibi": True, "multi_query": False, "parallel_attn": False}}
        return transformers.FalconConfig(vocab_size=VOCAB, hidden_size=96, num_hidden_layers=LAYERS, pad_token_id=0,
                                         num_attention_heads=12, bos_token_id=1, eos_token_id=None, **kinds[name])
    if name == "mpt":
        return transformers.MptConfig(vocab_size=VOCAB, d_model=96, n_layers=LAYERS, n_heads=12, max_seq_len=512,
                                      attn_config={"clip_qkv": 2.5, "softmax_scale": 0.5}, eos_token_id=None)
    if name == "t5":
        return transformers.T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4,
                                     relative_attention_num_buckets=16, relative_attention_max_distance=40,
                                     dropout_rate=0.0, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
                                     tie_word_embeddings=False)
    if name == "bart":
        return transformers.BartConfig(vocab_size=VOCAB, d_model=64, encoder_layers=3, decoder_layers=3,
                                       encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
                                       decoder_ffn_dim=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
                                       eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None)
    raise ValueError(name)


PATCHED = ("bloom", "falcon", "falcon_new", "falcon_alibi", "mpt")  # by folio.transformers.patch
DECODERS = ("llama", "mistral", "mistral24", "gemma2", "gpt_oss", "deepseek_v3", *PATCHED)
ENCODER_DECODERS = ("t5", "bart")
BATCHED = ("llama", "mistral", "mistral24", "gemma2", "gpt_oss")  # those whose shapes the paged cache supports
_CLASSES = {"t5": transformers.T5ForConditionalGeneration, "bart": transformers.BartForConditionalGeneration}


def make_model(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Matrices of a scale at which attention decides the tokens: see test_attention_decides."""
    torch.manual_seed(1)
    config = _config(name)
    model = _CLASSES[name](config) if name in _CLASSES else transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter.shape[-1] if "expert" not in key else parameter.shape[-2]
            scale = 1.0 if "embed" in key or "shared" in key else 1.6 * fan_in**-0.5
            if "relative_attention_bias" in key:
                scale = 2.0
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif key.endswith("sinks"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model.eval().to(device=device, dtype=dtype)


def use(model: Any, name: str, implementation: str) -> None:
    """Chooses the attention of a model. "zero" returns zeros."""
    if name in PATCHED:
        folio_hf.restore(model)
        # Falcon's eager attention adds ALiBi's biases twice (transformers 5.17 to 5.23)
        model.config._attn_implementation = "sdpa" if name == "falcon_alibi" else "eager"
        if implementation == "folio":
            folio_hf.patch(model)
        elif implementation == "zero":
            for module in model.modules():
                if type(module).__name__ in ("BloomAttention", "FalconAttention", "MptAttention"):
                    module.forward = _forward_zero
        return
    # Before 5.22, T5's encoder and decoder keep configurations of their own.
    for part in (model, model.encoder, model.decoder) if name == "t5" else (model,):
        part.set_attn_implementation(implementation)


def _zero(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
          **kwargs: Any) -> tuple:
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _forward_zero(hidden_states: torch.Tensor, residual: Any = None, *args: Any, **kwargs: Any) -> tuple:
    return (residual if type(residual) is torch.Tensor else torch.zeros_like(hidden_states)), None


AttentionInterface.register("zero", _zero)
AttentionMaskInterface.register("zero", sdpa_mask)


def prompts(lens: tuple = PROMPT_LENS, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lens]


class Generated(NamedTuple):
    tokens: torch.Tensor  # [requests, new tokens]
    logits: torch.Tensor  # [requests, new tokens, vocabulary]


def generate(model: Any, name: str, ids: list[list[int]], **options: Any) -> Generated:
    """Greedy, as one padded batch: on the left, for encoders on the right."""
    encoder = name in ENCODER_DECODERS
    longest = max(map(len, ids))
    tokens = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(ids):
        where = slice(0, len(row)) if encoder else slice(longest - len(row), longest)
        tokens[i, where], mask[i, where] = torch.tensor(row), 1
    out = model.generate(tokens.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=NEW_TOKENS,
                         do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
                         output_logits=True, **options)
    return Generated(out.sequences[:, -NEW_TOKENS:].cpu(), torch.stack(out.logits, 1).float().cpu())


class Batched(NamedTuple):
    tokens: torch.Tensor
    logprobs: torch.Tensor  # [requests, new tokens] of the tokens


def generate_batch(model: Any, ids: list[list[int]], *, num_blocks: int, max_batch_tokens: int, page: int = 16,
                   return_sequences: Optional[int] = None) -> Batched:
    """Greedy, by continuous batching."""
    page_option = "block_size" if folio_hf.interface() == "5.17" else "page_size"
    options = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, return_logprobs=True,
                                       use_cuda_graph=False, **{page_option: page})
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    config.num_return_sequences = return_sequences  # not above: it would ask for sampling
    if return_sequences is None:
        results = list(model.generate_batch(ids, generation_config=config, continuous_batching_config=options,
                                            progress_bar=False).values())
    else:  # generate_batch of 5.17 drops forks
        with model.continuous_batching_context_manager(generation_config=config,
                                                       continuous_batching_config=options) as manager:
            manager.add_requests(inputs=ids, max_new_tokens=NEW_TOKENS)
            results = []
            while len(results) < len(ids) * return_sequences:
                result = manager.get_result(timeout=120)
                assert result is not None, "no result within two minutes"
                results += [result] if result.is_finished() else []
    for result in results:
        assert result.error is None, result.error
    assert len(results) == len(ids) * (return_sequences or 1)
    return Batched(torch.tensor([r.generated_tokens for r in results]), torch.tensor([r.logprobs for r in results]))


def compare(reference: Generated, tokens: torch.Tensor, *, logits: Optional[torch.Tensor] = None,
            logprobs: Optional[torch.Tensor] = None, tolerance: float = 2e-3) -> int:
    """Asserts equal tokens and close numbers up to the first difference of each request, which may only be where the
    reference's two best logits are close. Prints and returns how many such places there are."""
    ties = 0
    for i, (expected, got) in enumerate(zip(reference.tokens, tokens)):
        differ = (expected != got).nonzero()
        end = int(differ[0]) if len(differ) else len(expected)
        if logits is not None:
            error = (reference.logits[i, :end] - logits[i, :end]).abs().amax() if end else 0
            assert error < tolerance, f"request {i}: logits differ by {error:.2e} before the first different token"
        if logprobs is not None:
            own = torch.log_softmax(reference.logits[i, :end], -1).gather(-1, expected[:end, None])[:, 0]
            error = (own - logprobs[i, :end]).abs().amax() if end else 0
            assert error < tolerance, f"request {i}: log probabilities differ by {error:.2e}"
        if end < len(expected):
            best = reference.logits[i, end].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < CLOSE, f"request {i}, token {end}: {int(got[end])}, not {int(expected[end])}; gap {gap:.2e}"
            ties += 1
    print(f"{ties} of {len(tokens)} requests differ from a near tie on")
    return ties
