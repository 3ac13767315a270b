"""Tiny random targets and drafters for tests that decode, train or store; seconds on a CPU."""

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import to_zlab

if TYPE_CHECKING:
    from dflash.target.model import Target

VOCAB, BLOCK, MASK = 67, 6, 66
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # large, so that the tiny model's greedy text is not one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, window 5": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "gemma2, window 5": lambda: transformers.Gemma2Config(**SIZES, sliding_window=5),
    "gemma3, window 5": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}
TAPS = (0, 2)


def as_target(model: PreTrainedModel, taps: tuple[int, ...] = TAPS) -> "Target":
    """The attributes of a loaded target that decoding relies on."""
    model.eval().requires_grad_(requires_grad=False)
    parts = SimpleNamespace(
        model=model,
        taps=taps,
        device="cpu",
        dtype=torch.float32,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        embedding_VD=model.get_input_embeddings().weight,
        lm_head_VD=model.get_output_embeddings().weight,
        lock=threading.Lock(),
    )
    return cast("Target", parts)


def tiny_target(config: PretrainedConfig, seed: int = 0) -> "Target":
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return as_target(model)


def tiny_drafter(seed: int = 0, **changes: object) -> Drafter:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "target_layer_ids": TAPS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
    }
    drafter = Drafter(DrafterShape(**(sizes | changes)))  # type: ignore[arg-type])
    drafter.initialise(seed)
    return drafter.eval()


def write_checkpoint(
    folder: Path,
    drafter: Drafter,
    *,
    step: int = 40,
    target: tuple[str, str] = ("targets/tiny-lm", "f" * 64),
    tau: float | None = None,
) -> Path:
    """A checkpoint as training leaves it, less the optimizer."""
    folder.mkdir(parents=True)
    save_file(drafter.state_dict(), folder / "drafter.safetensors")
    content = (folder / "drafter.safetensors").read_bytes()
    manifest = {
        "format_version": 1,
        "step": step,
        "shape": to_zlab(drafter.shape, dtype="float32"),
        "target": dict(zip(("source", "fingerprint"), target, strict=True)),
        "files": {"drafter.safetensors": hashlib.sha256(content).hexdigest()},
        "metrics": {"tau": tau},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
