"""The run folder: who may write into it, and what stands in it besides checkpoints."""

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash.config import RunConfig, to_toml
from dflash.environment import environment
from dflash.errors import UsageError, reason, remedy
from dflash.train.stored import complete_checkpoints

if TYPE_CHECKING:
    from dflash.train.build import Built
    from dflash.train.devices import SumChoice

CONFIG = "config.toml"
RECORDS = "records.jsonl"
ENVIRONMENT = "environment.json"
STACKS = "stacks.txt"
DATA = "data"
LOCK = ".lock"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold the run folder against a second process while inside.

    Raises:
        UsageError: another process is training into it, or it cannot be written.
    """
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    with _locked(run_dir):
        try:
            yield
        finally:
            if missing:
                _remove_unused([run_dir / DATA, *missing], lock=run_dir / LOCK)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    with ExitStack() as held:
        while True:
            with writable(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((run_dir / LOCK).open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process is training into {run_dir}",
                    hint="wait for it, or choose another --run-dir",
                ) from error
            if _is_at(run_dir / LOCK, lock.fileno()):
                break  # else another process has removed the file meanwhile: lock the next one
        yield


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _remove_unused(folders: Iterable[Path], *, lock: Path) -> None:
    """Remove folders that were made for nothing, if they are empty but for *lock*."""
    with suppress(OSError):  # one that holds something stays, and so do those around it
        for folder in folders:
            if folder == lock.parent and set(folder.iterdir()) == {lock}:
                lock.unlink()
            if folder.is_dir():
                folder.rmdir()


@contextmanager
def writable(run_dir: Path) -> Iterator[None]:
    """Turn an error of the file system inside into a sentence about the run folder.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        kept = "; complete checkpoints are untouched" if complete_checkpoints(run_dir) else ""
        raise UsageError(
            f"the run folder {run_dir} cannot be written: {reason(error)}",
            hint=f"{remedy(error)}, or choose another --run-dir{kept}",
        ) from error


def write_config(run_dir: Path, config: RunConfig) -> None:
    """Write the resolved configuration; it loads back equal."""
    _replace(run_dir / CONFIG, to_toml(config))


def choices(built: "Built", gradient_sum: "SumChoice") -> dict[str, Any]:
    """What a run settled for, with the reasons, for its ``environment.json``."""
    devices = built.devices
    return {
        "mode": devices.mode.mode,
        "mode_why": devices.mode.why,
        "gradient_sum": gradient_sum.kind,
        "gradient_sum_why": gradient_sum.why,
        "notes": list(built.notes),
        "target_devices": list(devices.targets),
        "drafter_devices": list(devices.drafters),
        "compute_dtype": str(devices.compute_dtype),
        "num_parameters": built.shape.num_parameters,
        "num_anchors": built.steps[0].loss.num_anchors,
        "num_steps": built.num_steps,
    }


def write_environment(run_dir: Path, chosen: dict[str, Any]) -> None:
    """Write versions, devices, and what was *chosen* for this run and why."""
    facts = environment().model_dump(mode="json")
    facts["run"] = {"command": sys.argv[1:], "num_threads": torch.get_num_threads(), **chosen}
    _replace(run_dir / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
