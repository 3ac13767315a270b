"""Reading a drafter from disk: a run folder, a checkpoint folder, or an exported z-lab folder.

Only what eval, generate and export need is read here: the shape and the weights. What training
writes beside them (optimizer, data position) is another file's business, but the manifest and the
way a file is checked against it are stated once, here.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import from_zlab
from dflash.errors import CheckpointError

FORMAT_VERSION: Final = 1
MANIFEST = "manifest.json"
DRAFTER_FILE = "drafter.safetensors"
CHECKPOINTS = "checkpoints"
BEST = "best"
RUN_CONFIG = "config.toml"
ZLAB_WEIGHTS = "model.safetensors"
STEP_FOLDER = re.compile(r"step-(\d+)")

ManifestKind = TypeVar("ManifestKind", bound="Manifest")


class TargetRef(BaseModel):
    """Which target a drafter belongs to."""

    source: str
    fingerprint: str


class Metrics(BaseModel):
    """What was measured at this step, if anything was."""

    tau: float | None = None


class Manifest(BaseModel):
    """``manifest.json``: written last, so a folder that has one is complete."""

    format_version: Literal[1]
    step: int
    shape: dict[str, Any]
    target: TargetRef
    files: dict[str, str]
    metrics: Metrics = Metrics()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDrafter:
    """A drafter as it lies on disk. A z-lab folder names neither its step nor its target."""

    path: Path
    shape: DrafterShape
    weights: dict[str, Tensor]
    step: int | None
    target_source: str | None
    target_fingerprint: str | None
    tau: float | None

    @property
    def run_dir(self) -> Path | None:
        """The run folder that this checkpoint lies in, if it does."""
        return run_of(self.path)

    def drafter(self, *, device: torch.device | str, dtype: torch.dtype) -> Drafter:
        """Build the module with these weights, in eval mode."""
        return drafter_of(self.shape, self.weights, device=device, dtype=dtype)


def drafter_of(
    shape: DrafterShape,
    weights: dict[str, Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Drafter:
    """Build a drafter of *weights*, copied to *device* and *dtype*; frozen and in eval mode."""
    with torch.device("meta"):  # no memory for weights that are replaced at once
        drafter = Drafter(shape).requires_grad_(requires_grad=False).eval()
    cast = {name: weight.detach().to(device, dtype) for name, weight in weights.items()}
    drafter.load_state_dict(cast, assign=True)
    drafter.to(device)  # the rotary frequencies, which are on the CPU at first
    return drafter


def open_checkpoint(path: Path) -> StoredDrafter:
    """Read the drafter at *path*: run folder (best, else newest), checkpoint, or z-lab folder.

    Raises:
        CheckpointError: nothing there, damaged, of another format version, or not a drafter.
    """
    folder = find_checkpoint(path)
    if (folder / MANIFEST).is_file():
        return _open_ours(folder)
    return _open_zlab(folder)


def find_checkpoint(path: Path) -> Path:
    """Return the folder that *path* stands for, without reading it.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder at {path}")
    if (path / MANIFEST).is_file() or (path / ZLAB_WEIGHTS).is_file():
        return path
    if (path / CHECKPOINTS).is_dir():
        return _best(path) or _newest(path)
    if (path / RUN_CONFIG).is_file():
        raise _no_checkpoint(path)
    if STEP_FOLDER.fullmatch(path.name):
        raise CheckpointError(
            f"the checkpoint {path} is incomplete: it has no {MANIFEST}, which is written last",
            hint="use another checkpoint of the same run, or the run folder itself",
        )
    raise CheckpointError(
        f"{path} is neither a run folder, nor a checkpoint, nor an exported drafter",
        hint=f"expected {CHECKPOINTS}/, {MANIFEST} or {ZLAB_WEIGHTS} in it",
    )


def run_of(folder: Path) -> Path | None:
    """The run folder that the checkpoint *folder* lies in, if it does."""
    return folder.parent.parent if folder.parent.name == CHECKPOINTS else None


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Every complete checkpoint of a run, oldest first; half-written ones are passed over."""
    folders = [
        folder
        for folder in (run_dir / CHECKPOINTS).glob("step-*")
        if STEP_FOLDER.fullmatch(folder.name) and (folder / MANIFEST).is_file()
    ]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        CheckpointError: unreadable, or of another format version.
    """
    return read_manifest_as(Manifest, folder)


def read_manifest_as(kind: type[ManifestKind], folder: Path) -> ManifestKind:
    """Read and check ``manifest.json`` as a manifest of *kind*.

    Raises:
        CheckpointError: unreadable, of another format version, or of another step than the folder
            is named after.
    """
    tree = _read_json(folder / MANIFEST)
    version = tree.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {version!r}, this version reads {FORMAT_VERSION}"
        )
    try:
        manifest = kind.model_validate(tree)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: {where}: {error.errors()[0]['msg']}"
        ) from error
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"the checkpoint {folder} is named after step {int(named[1])}, but its {MANIFEST} says"
            f" step {manifest.step}",
            hint=f"a checkpoint of step {manifest.step} belongs into a folder"
            f" step-{manifest.step:08d}; rename it, or move it away",
        )
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare *names* in *folder* with the sums in its manifest.

    Raises:
        CheckpointError: a file is missing or its sha256 differs.
    """
    for name in names:
        path = folder / name
        if name not in manifest.files or not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != manifest.files[name]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: sha256 of {name} is {found[:12]}..., "
                f"its manifest says {manifest.files[name][:12]}..."
            )


def _open_ours(folder: Path) -> StoredDrafter:
    manifest = read_manifest(folder)
    check_files(folder, manifest, [DRAFTER_FILE])
    shape = from_zlab(manifest.shape)
    return StoredDrafter(
        path=folder,
        shape=shape,
        weights=_read_weights(folder / DRAFTER_FILE, shape),
        step=manifest.step,
        target_source=manifest.target.source,
        target_fingerprint=manifest.target.fingerprint,
        tau=manifest.metrics.tau,
    )


def read_zlab_shape(folder: Path) -> DrafterShape:
    """Read what the ``config.json`` of an exported folder says of its drafter.

    Raises:
        CheckpointError: unreadable, or not of a drafter that is computed here.
    """
    return from_zlab(_read_json(folder / "config.json"))


def _open_zlab(folder: Path) -> StoredDrafter:
    shape = read_zlab_shape(folder)
    return StoredDrafter(
        path=folder,
        shape=shape,
        weights=_read_weights(folder / ZLAB_WEIGHTS, shape),
        step=None,
        target_source=None,
        target_fingerprint=None,
        tau=None,
    )


def _read_weights(path: Path, shape: DrafterShape) -> dict[str, Tensor]:
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    with torch.device("meta"):
        expected = {name: w.shape for name, w in Drafter(shape).state_dict().items()}
    if weights.keys() != expected.keys():
        odd = sorted(weights.keys() ^ expected.keys())
        state = "is missing" if odd[0] in expected else "is not part of a drafter of that shape"
        raise CheckpointError(
            f"{path} does not hold the drafter that its config describes: {odd[0]} {state} "
            f"({len(odd)} such tensors)"
        )
    for name, size in expected.items():
        if weights[name].shape != size:
            raise CheckpointError(
                f"{path}: {name} has shape {list(weights[name].shape)}, "
                f"its config says {list(size)}"
            )
    return weights


def _best(run_dir: Path) -> Path | None:
    pointer = run_dir / CHECKPOINTS / BEST
    if not pointer.is_file():
        return None
    folder = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    if not (folder / MANIFEST).is_file():
        complete = complete_checkpoints(run_dir)
        raise CheckpointError(
            f"{pointer} names {folder.name}, which is not a complete checkpoint",
            hint=f"name another one directly: {', '.join(path.name for path in complete)}"
            if complete
            else f"none in {run_dir} is; dflash train sets it aside and begins again",
        )
    return folder


def _newest(run_dir: Path) -> Path:
    folders = complete_checkpoints(run_dir)
    if not folders:
        raise _no_checkpoint(run_dir)
    return folders[-1]


def _no_checkpoint(run_dir: Path) -> CheckpointError:
    return CheckpointError(
        f"the run {run_dir} has no complete checkpoint yet",
        hint="one is saved every checkpoint.every_steps steps, at SIGUSR2 and at the end of"
        " dflash train",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return tree
