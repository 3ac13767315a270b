"""Tiny random targets of every shape that must work, made without any file of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

NUM_LAYERS = 5
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * NUM_LAYERS


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**SMALL)


def _qwen2_sliding() -> PretrainedConfig:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    return transformers.Qwen2Config(**SMALL, **window)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)


def _qwen3_moe() -> PretrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return transformers.Qwen3MoeConfig(**SMALL, head_dim=8, **experts)


def _gemma() -> PretrainedConfig:
    return transformers.GemmaConfig(**SMALL, head_dim=8)


def _gemma2() -> PretrainedConfig:
    kinds = ALTERNATING[:NUM_LAYERS]
    return transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, layer_types=kinds
    )


def _gemma3() -> PretrainedConfig:
    kinds = ALTERNATING[:NUM_LAYERS]
    return transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=5, layer_types=kinds)


def _mistral_sliding() -> PretrainedConfig:
    return transformers.MistralConfig(**SMALL, head_dim=8, sliding_window=5)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2_sliding": _qwen2_sliding,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral_sliding": _mistral_sliding,
}


def random_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a causal LM in fp32 whose weights are large enough for context to matter."""
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer of 60 tokens, four of them special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<reserved>", *[f"w{i}" for i in range(4, 60)]]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w4")  # noqa: S106
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<reserved>"], **special
    )
    fast.save_pretrained(folder)


def write_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Write a model folder and return it."""
    random_model(name, seed=seed).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
