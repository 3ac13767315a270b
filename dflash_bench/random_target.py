"""A target of a bench shape's size with random weights: nothing is read but a small tokenizer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash.data.stdlib import stdlib_files
from dflash.target.loading import STDLIB_LM, Loaded, load_tokenizer, resolve_source
from dflash.target.model import Target
from dflash_bench.shapes import BenchShape

DEFINITIONS_APART = re.compile(r"\n{3,}")
MIN_CHARACTERS = 64
JOINED_CHARACTERS = 1_000_000


def random_target(
    shape: BenchShape, *, device: torch.device, dtype: torch.dtype, seed: int
) -> Target:
    """Make a Qwen3 that the drafter of *shape* fits, with its weights drawn on *device*."""
    import transformers  # a second, which benches without a target need not wait for

    drafter = shape.drafter
    config = transformers.Qwen3Config(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_hidden_layers=drafter.num_target_layers,
        num_attention_heads=drafter.num_heads,
        num_key_value_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        max_position_embeddings=drafter.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype)
    tokenizer = load_tokenizer(resolve_source(STDLIB_LM))
    return Target(Loaded(model, tokenizer), taps=drafter.target_layer_ids, device=str(device))


def write_definitions(out: Path, *, joined: bool = False) -> Path:
    """Write real text of real, varying lengths: the standard library's top-level definitions.

    *joined*, a few of them are one text each, long enough to be cut into pieces of equal length.
    """
    with out.open("w", encoding="utf-8") as file:
        for text in _joined_definitions() if joined else _definitions():
            file.write(json.dumps({"text": text}) + "\n")
    return out


def _definitions() -> Iterator[str]:
    for path in stdlib_files("train"):
        for text in DEFINITIONS_APART.split(path.read_text(encoding="utf-8", errors="ignore")):
            if len(text) >= MIN_CHARACTERS:
                yield text


def _joined_definitions() -> Iterator[str]:
    parts: list[str] = []
    for text in _definitions():
        parts.append(text)
        if sum(map(len, parts)) >= JOINED_CHARACTERS:
            yield "\n".join(parts)
            parts.clear()
