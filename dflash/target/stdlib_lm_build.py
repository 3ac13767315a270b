"""Build the shipped target: train a small Qwen3-shape model on standard-library source.

``python -m dflash.target.stdlib_lm_build --out FOLDER --device cuda --seconds 120``

The size is decided by 8 MB of package: 3.6 M parameters in bf16 are 7.2 MB.
"""

import argparse
import json
import math
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from dflash.data.stdlib import stdlib_files
from dflash.errors import UsageError
from dflash.target.stdlib_lm_text import (
    END_OF_TEXT,
    PAD,
    TURN_END,
    VOCAB_ROWS,
    Corpus,
    write_tokenizer,
)

MAX_FOLDER_BYTES = 8_000_000
SEQUENCE_TOKENS = 1024
HELDOUT_SEQUENCES = 64
DOCUMENT_START_SHARE = 0.25
"""A quarter of the sequences begin where a document begins, as a prompt does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How the model is trained; the run ends at whichever of steps and seconds comes first."""

    steps: int | None = 4000
    seconds: float | None = None
    device: str = "cpu"
    batch_sequences: int = 64
    sequence_tokens: int = SEQUENCE_TOKENS
    lr: float = 2e-3
    weight_decay: float = 0.1
    warmup_share: float = 0.03
    seed: int = 0


def model_config() -> Qwen3Config:
    """Return the shape: 8 layers so that five default taps are five different layers."""
    return Qwen3Config(
        vocab_size=VOCAB_ROWS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=SEQUENCE_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
        pad_token_id=PAD,
        use_cache=True,
    )


class Windows:
    """Random windows over a corpus that lies on the device; no host synchronisation."""

    def __init__(self, corpus: Corpus, settings: BuildSettings, *, seed: int) -> None:
        num_tokens, device = settings.sequence_tokens, settings.device
        if len(corpus.tokens) <= num_tokens + 1:
            raise UsageError(f"the text has {len(corpus.tokens)} tokens, a window {num_tokens}")
        last = len(corpus.tokens) - num_tokens - 1
        self.tokens = torch.from_numpy(corpus.tokens.astype(np.int64)).to(device)
        self.starts = torch.from_numpy(corpus.starts).clamp(max=last).to(device)
        self.last = last
        self.offsets = torch.arange(num_tokens + 1, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """Return int64 [count, num_tokens + 1]."""
        made, device = self.generator, self.tokens.device
        anywhere = torch.randint(0, self.last + 1, (count,), generator=made, device=device)
        chosen = torch.randint(0, len(self.starts), (count,), generator=made, device=device)
        at_start = torch.rand(count, generator=made, device=device) < DOCUMENT_START_SHARE
        begin = torch.where(at_start, self.starts[chosen], anywhere)
        return self.tokens[begin[:, None] + self.offsets]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in nats; bf16 compute on a GPU, fp32 on a CPU."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def learning_rate(settings: BuildSettings, progress: float) -> float:
    """Return linear warm-up, then cosine to zero, at a progress in [0, 1]."""
    if progress < settings.warmup_share:
        return settings.lr * (progress / settings.warmup_share + 1e-3)
    done = (progress - settings.warmup_share) / (1 - settings.warmup_share)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def train(
    model: nn.Module, texts: dict[str, Corpus], settings: BuildSettings, *, console: Console
) -> dict[str, Any]:
    """Train in place; return steps, seconds and losses (nats per token)."""
    windows = Windows(texts["train"], settings, seed=settings.seed)
    heldout = Windows(texts["heldout"], settings, seed=settings.seed + 1).draw(HELDOUT_SEQUENCES)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    begun, step, next_report = time.monotonic(), 0, 0.0
    history: list[dict[str, float]] = []
    while True:
        elapsed = time.monotonic() - begun
        progress = max(
            step / settings.steps if settings.steps else 0.0,
            elapsed / settings.seconds if settings.seconds else 0.0,
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, progress)
        loss = loss_of(model, windows.draw(settings.batch_sequences))
        if progress >= next_report or progress >= 1:
            history.append(_report(model, heldout, step=step, loss=loss))
            console.print(f"{progress:6.1%}  {elapsed:6.1f} s  {history[-1]}")
            next_report = progress + 0.1
        if progress >= 1:
            return {"steps": step, "seconds": round(elapsed, 1), "history": history}
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1


@torch.no_grad()
def _report(model: nn.Module, heldout: Tensor, *, step: int, loss: Tensor) -> dict[str, float]:
    pieces = [loss_of(model, piece).item() for piece in torch.split(heldout, 16)]
    measured = {"train_nats": loss.item(), "heldout_nats": sum(pieces) / len(pieces)}
    return {"step": step} | {name: round(value, 4) for name, value in measured.items()}


def save(model: Qwen3ForCausalLM, folder: Path, provenance: dict[str, Any]) -> None:
    """Write the model folder: bf16 weights, config with both RoPE forms, tokenizer, provenance."""
    if folder.exists():
        raise UsageError(f"{folder} exists; the builder does not overwrite", hint="name another")
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(beside)
    write_tokenizer(beside)
    config = json.loads((beside / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "bfloat16"
    config["rope_theta"] = 10000.0  # transformers 5 writes rope_parameters only, 4.57 reads this
    for name, value in (("config", config), ("provenance", provenance)):
        text = json.dumps(value, indent=2) + "\n"
        (beside / f"{name}.json").write_text(text, encoding="utf-8")
    beside.rename(folder)


def build(out: Path, settings: BuildSettings, console: Console) -> dict[str, Any]:
    """Train and write the model; return its provenance."""
    torch.manual_seed(settings.seed)
    texts = {"train": Corpus(stdlib_files("train")), "heldout": Corpus(stdlib_files("heldout"))}
    model = Qwen3ForCausalLM(model_config())
    nn.Module.to(model, settings.device)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[END_OF_TEXT, TURN_END], pad_token_id=PAD, do_sample=False
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{num_parameters:,} parameters, {len(texts['train'].tokens):,} training tokens")
    measured = train(model, texts, settings, console=console)
    on_gpu = settings.device.startswith("cuda")
    provenance = {
        "what": "byte-level language model of the Python standard library's source",
        "built_by": "python -m dflash.target.stdlib_lm_build",
        "num_parameters": num_parameters,
        "settings": asdict(settings),
        **measured,
        "text": {
            name: {"num_tokens": len(text.tokens), "sha256": text.sha256}
            for name, text in texts.items()
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": torch.cuda.get_device_name(settings.device) if on_gpu else "cpu",
    }
    save(model, out, provenance)
    return provenance


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, build, and state the folder's size against its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--steps", type=int, help="optimizer steps (4000 without --seconds)")
    parser.add_argument("--seconds", type=float, help="wall time of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-sequences", type=int, default=64)
    parser.add_argument("--sequence-tokens", type=int, default=SEQUENCE_TOKENS)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    if given["steps"] is None and given["seconds"] is None:
        given["steps"] = 4000
    console = Console(stderr=True)
    build(out, BuildSettings(**given), console)
    size_bytes = sum(path.stat().st_size for path in out.iterdir())
    console.print(f"{out}: {size_bytes:,} of {MAX_FOLDER_BYTES:,} bytes")


if __name__ == "__main__":
    main()
