"""Writing checkpoints that survive a kill at any moment, and going on from them.

A checkpoint is written into ``step-XXXXXXXX.partial``, its manifest last, every file flushed to
the disk, and then the folder is renamed: a folder with the final name is complete. The learning
rate, the data order and the anchors are functions of the step, so no generator state is needed.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import to_zlab
from dflash.errors import CheckpointError
from dflash.train.stored import (
    BEST,
    CHECKPOINTS,
    DRAFTER_FILE,
    FORMAT_VERSION,
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    Metrics,
    TargetRef,
    check_files,
    complete_checkpoints,
    read_manifest,
    read_manifest_as,
)

OPTIMIZER_FILE = "optimizer.safetensors"
PARTIAL = ".partial"


class TrainingManifest(Manifest):
    """A manifest that training can go on from."""

    contract: dict[str, Any] = Field(description="settings that a resumed run must share")
    progress: dict[str, int | float] = Field(description="counters that go on where they were")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a checkpoint holds, as it is in memory."""

    step: int
    shape: DrafterShape
    target: TargetRef
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    contract: dict[str, Any]
    progress: dict[str, int | float]
    tau: float | None


class Keeper:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, *, keep_last: int, keep_best: bool) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / CHECKPOINTS
        self._keep_last = keep_last
        self._keep_best = keep_best

    def save(self, snapshot: Snapshot, *, is_best: bool) -> Path:
        """Write a checkpoint, then drop those that need not be kept.

        Raises:
            CheckpointError: it cannot be written (a full disk, say); earlier ones are untouched.
        """
        final = self._folder / f"step-{snapshot.step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            if not (final / MANIFEST).is_file():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _write(partial, snapshot)
                partial.rename(final)
                _flush(self._folder)
            if is_best and self._keep_best:
                _replace_text(self._folder / BEST, final.name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = complete_checkpoints(self._run_dir)
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} cannot be written to {self._folder}: "
                f"{error}",
                hint=f"free some space and run the same command again; the last complete one is "
                f"{kept[-1].name if kept else 'none'}",
            ) from error
        self._drop_old()
        return final

    def _drop_old(self) -> None:
        folders = complete_checkpoints(self._run_dir)
        best = self._folder / BEST
        kept = {folder.name for folder in folders[-self._keep_last :]}
        if best.is_file():
            kept.add(best.read_text(encoding="utf-8").strip())
        for folder in folders:
            if folder.name not in kept:
                doomed = folder.with_name(folder.name + PARTIAL)
                folder.rename(doomed)  # so that a kill in the middle leaves no damaged checkpoint
                shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what a killed process left half written."""
        for folder in self._folder.glob(f"step-*{PARTIAL}"):
            if STEP_FOLDER.fullmatch(folder.name.removesuffix(PARTIAL)):
                shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a checkpoint gives back."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    progress: dict[str, int | float]


def resume_from(folder: Path, contract: dict[str, Any]) -> Resumed:
    """Read a checkpoint that a run with *contract* may go on from.

    Raises:
        CheckpointError: damaged, foreign, of another format version, or made under another
            contract; names every setting that differs.
    """
    manifest = read_manifest(folder)
    if OPTIMIZER_FILE not in manifest.files:
        raise CheckpointError(
            f"{folder} holds a drafter but no optimizer state, so training cannot go on from it",
            hint="set drafter.init_from to start a new run from exported weights",
        )
    full = read_manifest_as(TrainingManifest, folder)
    differences = [
        f"{key} = {full.contract.get(key)!r} there, {value!r} here"
        for key, value in contract.items()
        if full.contract.get(key) != value
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint {folder} contradicts this run: {'; '.join(differences)}",
            hint="use another --run-dir for another configuration, or restore the setting",
        )
    check_files(folder, full, [DRAFTER_FILE, OPTIMIZER_FILE])
    try:
        weights, state = load_file(folder / DRAFTER_FILE), load_file(folder / OPTIMIZER_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    return Resumed(folder, full.step, weights, state, full.progress)


def _write(folder: Path, snapshot: Snapshot) -> None:
    files = {DRAFTER_FILE: snapshot.weights, OPTIMIZER_FILE: snapshot.state}
    sums = {}
    for name, tensors in files.items():
        on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(on_host, folder / name)
        _flush(folder / name)
        with (folder / name).open("rb") as written:
            sums[name] = hashlib.file_digest(written, "sha256").hexdigest()
    manifest = TrainingManifest(
        format_version=FORMAT_VERSION,
        step=snapshot.step,
        shape=to_zlab(snapshot.shape, dtype="float32"),
        target=snapshot.target,
        files=sums,
        metrics=Metrics(tau=snapshot.tau),
        contract=snapshot.contract,
        progress=snapshot.progress,
    )
    _replace_text(folder / MANIFEST, manifest.model_dump_json(indent=2))
    _flush(folder)


def _replace_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + PARTIAL)
    beside.write_text(text + "\n", encoding="utf-8")
    _flush(beside)
    beside.replace(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
