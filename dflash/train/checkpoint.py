"""Writing checkpoints that survive a kill at any moment, and going on from them.

A checkpoint is written into ``step-XXXXXXXX.partial``, its manifest last, every file flushed to
the disk, and then the folder is renamed: a folder with the final name is complete. The learning
rate, the data order and the anchors are functions of the step, so no generator state is needed.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config.text import toml_value
from dflash.data.shards import make_readable
from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import to_zlab
from dflash.errors import CheckpointError, reason, remedy
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
CONFIG_FILE = "config.toml"
PARTIAL = ".partial"
INCOMPLETE = ".incomplete-"


class Progress(BaseModel):
    """Counters that go on where they were."""

    tokens: int
    positions: int
    batches: int
    tokens_since_record: int
    positions_since_record: int
    best_tau: float


class TrainingManifest(Manifest):
    """A manifest that training can go on from."""

    contract: dict[str, Any] = Field(description="settings that a resumed run must share")
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a checkpoint holds, as it is in memory. ``tau`` was measured at this very step."""

    step: int
    shape: DrafterShape
    target: TargetRef
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    contract: dict[str, Any]
    progress: Progress
    config_toml: str
    tau: float | None


class Keeper:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int,
        keep_best: bool,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._run_dir = run_dir
        self._say = say
        self.set_aside: list[str] = []
        self._folder = run_dir / CHECKPOINTS
        self._keep_last = keep_last
        self._keep_best = keep_best

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, then drop those that need not be kept.

        Raises:
            CheckpointError: it cannot be written (a full disk, say); earlier ones are untouched.
        """
        final = self._folder / f"step-{snapshot.step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        with self._told(f"the checkpoint of step {snapshot.step}"):
            try:
                if not (final / MANIFEST).is_file():
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
                    _write(partial, snapshot)
                    self._set_aside(final)
                    partial.rename(final)
                    _flush(self._folder)
                self._point_at_best()
                self._drop_old()
            except (OSError, SafetensorError):
                shutil.rmtree(partial, ignore_errors=True)
                raise
        return final

    def _set_aside(self, folder: Path) -> None:
        """Rename a step's folder that has no manifest, if there is one, and say so."""
        if not os.path.lexists(folder):
            return
        names = (f"{folder.name}{INCOMPLETE}{number}" for number in count(1))
        aside = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
        folder.rename(aside)
        self.set_aside.append(aside.name)
        self._say(
            f"the checkpoint {folder} is incomplete (it has no {MANIFEST}) and was set aside as"
            f" {aside.name}"
        )

    def add_tau(self, step: int, *, tau: float, best_tau: float) -> None:
        """Enter what was measured after the checkpoint of *step* was written, if it is here.

        Raises:
            CheckpointError: it cannot be written.
        """
        folder = self._folder / f"step-{step:08d}"
        if not (folder / MANIFEST).is_file():
            return
        before = read_manifest_as(TrainingManifest, folder)
        progress = before.progress.model_copy(update={"best_tau": best_tau})
        changes = {"metrics": Metrics(tau=tau), "progress": progress}
        with self._told(f"the tau of step {step}"):
            _replace_text(
                folder / MANIFEST, before.model_copy(update=changes).model_dump_json(indent=2)
            )
            self._point_at_best()

    def newest(self) -> Path | None:
        """The newest complete checkpoint, if there is one."""
        return next(reversed(complete_checkpoints(self._run_dir)), None)

    def require_readable(self) -> None:
        """Look at the manifests that every save compares, before there is anything to lose.

        Raises:
            CheckpointError: one before the newest cannot be read.
        """
        *older, newest = complete_checkpoints(self._run_dir) or [Path()]
        for folder in older if self._keep_best else ():
            try:
                read_manifest(folder)
            except CheckpointError as error:
                hint = error.hint or f"move that folder away; the run goes on from {newest.name}"
                raise CheckpointError(error.what, hint=hint) from error

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn an error of the file system inside into a sentence that names *what*."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            newest = self.newest()
            last = f"the last complete one is {newest.name}" if newest else ""
            raise CheckpointError(
                f"{what} cannot be written to {self._folder}: {reason(error)}",
                hint=f"{remedy(error)} and run the same command again;"
                f" {last or 'there is no complete one yet'}",
            ) from error

    def _point_at_best(self) -> None:
        """Make the pointer name the checkpoint of the longest accepted length, the first if equal.

        It is derived from the manifests each time, so a kill before this leaves nothing to mend.
        """
        if not self._keep_best:
            (self._folder / BEST).unlink(missing_ok=True)
            return
        measured = {
            folder.name: read_manifest(folder).metrics.tau or 0.0
            for folder in complete_checkpoints(self._run_dir)
        }
        best = max(measured, key=lambda name: measured[name], default="")
        if best and measured[best] and best != self._named_best():
            _replace_text(self._folder / BEST, best)

    def _named_best(self) -> str:
        pointer = self._folder / BEST
        return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""

    def _drop_old(self) -> None:
        folders = complete_checkpoints(self._run_dir)
        kept = {folder.name for folder in folders[-self._keep_last :]}
        if self._keep_best:
            kept.add(self._named_best())
        for folder in folders:
            if folder.name not in kept:
                doomed = folder.with_name(folder.name + PARTIAL)
                folder.rename(doomed)  # so that a kill in the middle leaves no damaged checkpoint
                shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what a killed process left half written; set aside what else is no checkpoint.

        The folder of a step that lacks its manifest was once complete, so somebody may want it.
        """
        for folder in sorted(self._folder.glob("step-*")):
            if STEP_FOLDER.fullmatch(folder.name) and not (folder / MANIFEST).is_file():
                self._set_aside(folder)
            elif STEP_FOLDER.fullmatch(folder.name.removesuffix(PARTIAL)) and (
                folder.name.endswith(PARTIAL)
            ):
                shutil.rmtree(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a checkpoint gives back."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Tensor]
    progress: Progress
    config_toml: str
    tau: float | None


def _told(setting: object) -> str:
    """A setting as a config file has it."""
    return "nothing" if setting is None else toml_value(setting)


def resume_from(folder: Path, contract: dict[str, Any]) -> Resumed:
    """Read a checkpoint that a run with *contract* may go on from.

    Raises:
        CheckpointError: damaged, foreign, of another format version, or made under another
            contract; names every setting that differs.
    """
    exported = not (folder / MANIFEST).is_file()
    if exported or OPTIMIZER_FILE not in read_manifest(folder).files:
        raise CheckpointError(
            f"{folder} holds a drafter but no optimizer state, so training cannot go on from it",
            hint="set drafter.init_from to start a new run from these weights",
        )
    full = read_manifest_as(TrainingManifest, folder)
    differences = [
        f"{key} = {_told(full.contract.get(key))} there, {_told(value)} here"
        for key, value in contract.items()
        if full.contract.get(key) != value
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint {folder} contradicts this run: {'; '.join(differences)}",
            hint="use another --run-dir for another configuration, or restore the setting",
        )
    check_files(folder, full, [DRAFTER_FILE, OPTIMIZER_FILE, CONFIG_FILE])
    try:
        weights, state = load_file(folder / DRAFTER_FILE), load_file(folder / OPTIMIZER_FILE)
        config_toml = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    return Resumed(
        path=folder,
        step=full.step,
        weights=weights,
        state=state,
        progress=full.progress,
        config_toml=config_toml,
        tau=full.metrics.tau,
    )


def _write(folder: Path, snapshot: Snapshot) -> None:
    for name, tensors in ((DRAFTER_FILE, snapshot.weights), (OPTIMIZER_FILE, snapshot.state)):
        on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(on_host, folder / name)
        make_readable(folder / name)
    (folder / CONFIG_FILE).write_text(snapshot.config_toml, encoding="utf-8")
    sums = {}
    for name in (DRAFTER_FILE, OPTIMIZER_FILE, CONFIG_FILE):
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
