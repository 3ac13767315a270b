"""Writing a drafter for others: z-lab's layout, or that of the speculators library.

A folder appears under its name only after it was read back and found equal, in tensors, in config
and in what the drafter computes. Until then it stands beside, and is removed when anything fails.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.data.shards import make_readable
from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import to_zlab
from dflash.errors import CheckpointError, UsageError, reason, remedy
from dflash.train.model_card import model_card
from dflash.train.stored import ZLAB_WEIGHTS, StoredDrafter, drafter_of, open_checkpoint

if TYPE_CHECKING:
    from dflash.target.model import Target

STORED_DTYPE = torch.bfloat16  # what every published drafter is stored in
SPECULATORS_VERSION = "0.9.0"  # the release of speculators whose format this is
NOT_A_LAYER = {
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "is_causal",
    "num_target_layers",
}
"""Keys of z-lab's config that say nothing about a transformer layer."""


def export_zlab(stored: StoredDrafter, out: Path) -> None:
    """Write *stored* as vLLM, SGLang and z-lab's own code load it.

    Raises:
        UsageError: *out* is a file or a folder with something in it.
        CheckpointError: weights that are not finite, a failed write, or a failed reload.
    """
    weights = _stored_weights(stored)
    with _appearing(out) as folder:
        _write_json(folder / "config.json", to_zlab(stored.shape, dtype="bfloat16"))
        save_file(weights, folder / ZLAB_WEIGHTS, metadata={"format": "pt"})
        make_readable(folder / ZLAB_WEIGHTS)
        _write_text(folder / "README.md", model_card(stored, layout="z-lab"))
        verify_zlab(folder, stored.shape, weights)


def export_speculators(stored: StoredDrafter, out: Path, *, target: "Target", name: str) -> None:
    """Write *stored* as the speculators library loads it: self-contained, so with the target's
    embedding and head; *name* is how the config calls the target.

    Raises:
        UsageError, CheckpointError: as ``export_zlab``.
    """
    weights = _stored_weights(stored)
    for key, weight in (
        ("embed_tokens.weight", target.embedding_VD),
        ("lm_head.weight", target.lm_head_VD),
    ):
        weights[key] = weight.detach().to("cpu", STORED_DTYPE, copy=True).contiguous()
    config = speculators_config(
        stored.shape, target_name=name, architecture=type(target.model).__name__
    )
    with _appearing(out) as folder:
        _write_json(folder / "config.json", config)
        save_file(weights, folder / ZLAB_WEIGHTS, metadata={"format": "pt"})
        make_readable(folder / ZLAB_WEIGHTS)
        _write_text(folder / "README.md", model_card(stored, layout="speculators"))
        _compare(load_file(folder / ZLAB_WEIGHTS), weights, folder)
        if json.loads((folder / "config.json").read_text(encoding="utf-8")) != config:
            raise CheckpointError(f"{folder / 'config.json'} does not read back as it was written")


def speculators_config(
    shape: DrafterShape, *, target_name: str, architecture: str
) -> dict[str, Any]:
    """The config of the speculators layout; its layer ids count the embedding's output as 0."""
    ours = to_zlab(shape, dtype="bfloat16")
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": {k: v for k, v in ours.items() if k not in NOT_A_LAYER},
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "target_hidden_size": shape.hidden_size,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": [architecture]},
        },
    }


def verify_zlab(folder: Path, shape: DrafterShape, weights: dict[str, Tensor]) -> None:
    """Read *folder* back and compare it with what it was written from.

    Raises:
        CheckpointError: a key, shape, dtype, value, config field or computed output differs.
    """
    reloaded = open_checkpoint(folder)
    if reloaded.shape != shape:
        raise CheckpointError(f"the config in {folder} reads back as another drafter's")
    _compare(reloaded.weights, weights, folder)
    if not torch.equal(_probe(shape, reloaded.weights), _probe(shape, weights)):
        raise CheckpointError(f"the drafter in {folder} computes something else after reloading")


def _stored_weights(stored: StoredDrafter) -> dict[str, Tensor]:
    weights = {name: w.to(STORED_DTYPE).contiguous() for name, w in stored.weights.items()}
    broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{broken[0]} of {stored.path} holds values that are not finite ({len(broken)} such "
            "tensors), so there is nothing to export"
        )
    return weights


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    if found.keys() != expected.keys():
        raise CheckpointError(f"{folder} reads back with other tensors than were written")
    for name, weight in expected.items():
        if found[name].dtype != weight.dtype or not torch.equal(found[name], weight):
            raise CheckpointError(f"{name} in {folder} does not read back as it was written")


def _probe(shape: DrafterShape, weights: dict[str, Tensor]) -> Tensor:
    """One bf16 block after eight context tokens; inputs from a generator of our own."""
    drafter = drafter_of(shape, weights, device="cpu", dtype=STORED_DTYPE)
    generator = torch.Generator().manual_seed(0)
    context, slots = 8, shape.block_size

    def drawn(rows: int, width: int) -> Tensor:
        return torch.randn(1, rows, width, generator=generator).to(STORED_DTYPE)

    with torch.no_grad():
        out: Tensor = drafter(
            drawn(slots, shape.hidden_size),
            drawn(context, shape.num_taps * shape.hidden_size),
            positions_bT=torch.arange(context)[None],
            positions_bQ=torch.arange(context, context + slots)[None],
            mask=torch.ones(slots, context + slots, dtype=torch.bool),
            attention="eager",
        )
    return out


def require_new(out: Path) -> None:
    """Check, before anything is loaded, that nothing is at *out* but perhaps an empty folder.

    Raises:
        UsageError: there is.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already and is not an empty folder", hint="name a new one")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a folder beside *out* that takes its place when the block ends without an error."""
    require_new(out)
    beside = out.with_name(f"{out.name}.partial-{os.getpid()}")
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        beside.mkdir(parents=True)
        yield beside
        if out.exists():
            out.rmdir()
        beside.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out} cannot be written: {reason(error)}", hint=remedy(error)
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if not out.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    _write_text(path, json.dumps(tree, indent=2))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
