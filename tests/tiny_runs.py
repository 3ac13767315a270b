"""Whole training runs in miniature: a random target in a folder, a text, a configuration."""

import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from dflash.config import DataConfig, DrafterConfig, RunConfig, TargetConfig, to_toml
from dflash.config.sections import (
    CheckpointConfig,
    EvalConfig,
    ExecutionConfig,
    LogConfig,
    ObjectiveConfig,
    OptimConfig,
    PrecisionConfig,
)
from dflash.records import EventRecord, StepRecord, read_records
from dflash.train.outcome import Outcome
from dflash.train.run import TrainOptions, train

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = ["<pad>", "</s>", "<unk>"]
NUM_ROWS = 104  # of the embedding table: five beyond the tokenizer's
TIMES = {"tokens_per_s", "step_s", "wait_target_s", "wait_drafter_s", "wait_data_s", "rss_gib"}
SECTIONS: dict[str, Any] = {
    "target": TargetConfig,
    "drafter": DrafterConfig,
    "data": DataConfig,
    "objective": ObjectiveConfig,
    "optim": OptimConfig,
    "execution": ExecutionConfig,
    "precision": PrecisionConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}


def write_target(folder: Path, *, seed: int = 0) -> Path:
    """A random Qwen3 of four layers and a tokenizer of single characters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.Qwen3Config(
            vocab_size=NUM_ROWS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return folder


def write_texts(folder: Path, *, num_files: int = 12) -> Path:
    """Text files of different lengths; no two alike."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        lines = [f"line {n} of file {number}: {n * (number + 3)}" for n in range(2 + number)]
        (folder / f"text-{number}.txt").write_text("\n".join(lines))
    return folder


def tiny_config(place: Path, **changes: dict[str, Any]) -> RunConfig:
    """A run in milliseconds a step; *changes* replace keys by section, ``optim={"lr": 1.0}``."""
    values: dict[str, dict[str, Any]] = {
        "target": {"model": str(place / "target"), "taps": (0, 2), "devices": ("cpu",)},
        "drafter": {"num_layers": 1, "block_size": 4, "devices": ("cpu",)},
        "data": {
            "train": (str(place / "texts"),),
            "token_budget": 128,
            "max_document_tokens": 64,
            "anchor_density": 0.125,
        },
        "optim": {"max_steps": 40, "lr": 3e-3},
        "eval": {"num_prompts": 2, "max_new_tokens": 8},
        "checkpoint": {"every_steps": 20},
        "log": {"every_steps": 4},
    }
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return RunConfig(**{name: SECTIONS[name](**keys) for name, keys in values.items()})


def write_toml(path: Path, place: Path, **changes: dict[str, Any]) -> Path:
    """Write ``tiny_config`` to a file."""
    path.write_text(to_toml(tiny_config(place, **changes)))
    return path


def run(config: RunConfig, run_dir: Path, **options: Any) -> Outcome:  # noqa: ANN401
    return train(config, TrainOptions(run_dir=run_dir, **options))


def checkpoint(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    weights, state = (load_file(folder / f"{n}.safetensors") for n in ("drafter", "optimizer"))
    return weights | {f"state {name}": tensor for name, tensor in state.items()}


def assert_same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Step records without what a clock or this process measured."""
    records = read_records(run_dir / "records.jsonl")
    return [r.model_dump(exclude=TIMES) for r in records if isinstance(r, StepRecord)]


def events_of(run_dir: Path, name: str) -> list[EventRecord]:
    records = read_records(run_dir / "records.jsonl")
    return [r for r in records if isinstance(r, EventRecord) and r.name == name]


def wait_for_main() -> None:
    """Give the main thread the time to run the handler, before the drafter's thread goes on."""
    threading.Event().wait(0.3)
