"""Tiny checkpoints with random weights, as transformers saves them, and a tokenizer for them.

The weights are large: attention decides which token comes next, so that an error in it changes the tokens
(test_models.py shows that zeroing attention changes most of them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
             max_position_embeddings=2048, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=1,
             eos_token_id=2, pad_token_id=0)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=48, head_dim=32))


def _gemma2() -> Any:
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    # one windowed and one full layer, both soft caps
    options = SMALL | dict(tie_word_embeddings=True)
    model = Gemma2ForCausalLM(Gemma2Config(**options, num_key_value_heads=2, head_dim=64, sliding_window=32,
                                           query_pre_attn_scalar=64, attn_logit_softcapping=20.0,
                                           final_logit_softcapping=30.0))
    with torch.no_grad():
        for layer in model.model.layers:  # else the embedding outweighs attention, and each token repeats itself
            layer.post_attention_layernorm.weight.fill_(30.0)
    return model


def _gpt_oss() -> Any:
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=32, sliding_window=32,
                                           num_local_experts=4, num_experts_per_tok=2))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 2.0)
    return model


def _bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.3,
                                        bos_token_id=1, eos_token_id=2, pad_token_id=0))


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_labels=16,
                                                    num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
                                                    max_position_embeddings=512))


def _whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=VOCAB, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=80, init_std=0.3,
        max_source_positions=1500, max_target_positions=448, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        decoder_start_token_id=3, begin_suppress_tokens=None, suppress_tokens=None))


MODELS = {"llama": _llama, "mistral": _mistral, "gemma2": _gemma2, "gpt_oss": _gpt_oss, "bloom": _bloom, "bert": _bert,
          "whisper": _whisper}


def tokenizer() -> Any:
    """One token for each word w0, w1, ..., and the special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(4, VOCAB)]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   unk_token="<unk>")


def save(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Makes the checkpoint in folder/name, unless it is there."""
    path = Path(folder) / name
    if (path / "done").exists():
        return path
    import torch

    torch.manual_seed(1)
    model = MODELS[name]().to(getattr(torch, dtype))
    if hasattr(model, "generation_config"):
        model.generation_config.suppress_tokens = None
        model.generation_config.begin_suppress_tokens = None
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    if name == "whisper":
        from transformers import WhisperFeatureExtractor

        WhisperFeatureExtractor(feature_size=80, chunk_length=30).save_pretrained(path)
    (path / "done").write_text(json.dumps({"dtype": dtype}))
    return path
