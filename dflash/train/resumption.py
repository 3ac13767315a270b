"""Going on with a run: from which checkpoint, and what has changed since it was written."""

import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash.config import RunConfig, to_toml
from dflash.errors import CheckpointError, UsageError, WorkerDiedError
from dflash.records import EventRecord, read_records
from dflash.train.boundary import Boundary
from dflash.train.checkpoint import Resumed, resume_from
from dflash.train.events import event
from dflash.train.folder import RECORDS
from dflash.train.logbook import Counters
from dflash.train.step import TrainStep
from dflash.train.stored import complete_checkpoints, find_checkpoint

ORIGIN = "from"
"""Of a ``resumed`` event: the checkpoint of another folder, absolute."""


def start_of(run_dir: Path, resume: str) -> Path | None:
    """Return the checkpoint to go on from by ``--resume``: auto, never, or a path; None is step 0.

    A path outside *run_dir* starts an empty run folder; once the run that began there has
    checkpoints of its own the newest of them is taken, so that the same command goes on.

    Raises:
        CheckpointError: ``never`` in a folder that holds a run, a path without a checkpoint, or
            one inside *run_dir* that is not its newest.
        UsageError: a path outside *run_dir*, which holds a run that did not begin there.
    """
    own = complete_checkpoints(run_dir)
    newest = own[-1] if own else None
    if resume == "auto":
        return newest
    if resume == "never":
        if own:
            raise CheckpointError(
                f"{run_dir} already holds a run with {len(own)} checkpoints, and --resume never"
                " would mix two runs",
                hint="choose another --run-dir, or remove that one",
            )
        return None
    given = Path(resume)
    inside = complete_checkpoints(given)
    chosen = inside[-1] if inside else find_checkpoint(given)
    if newest is None or chosen.resolve() == newest.resolve():
        return chosen
    if chosen.resolve().is_relative_to(run_dir.resolve()):
        raise CheckpointError(
            f"--resume {resume}: {run_dir} holds later checkpoints, up to {newest.name}, which"
            " the run would meet again",
            hint="choose another --run-dir to go on from there, or remove the later checkpoints",
        )
    if chosen.resolve() != _origin(run_dir):
        raise UsageError(
            f"--resume {resume}: {run_dir} already holds a run of its own, up to {newest.name}, and"
            f" one folder cannot go on from both",
            hint=f"leave --resume out to go on with {run_dir}, or choose another --run-dir to go on"
            f" from {resume}",
        )
    return newest


def require_steps_left(resume: str, step: int, *, last_step: int) -> None:
    """Check that a run begun at *step* of the one at *resume* has a step to make.

    Raises:
        UsageError: it has none.
    """
    if step >= last_step:
        raise UsageError(
            f"--resume {resume} is at step {step} already, and {last_step} steps are asked for",
            hint="--max-steps N or optim.max_steps asks for more",
        )


def _origin(run_dir: Path) -> Path | None:
    """The checkpoint of another folder from which the run in *run_dir* began, if it did."""
    if not (run_dir / RECORDS).is_file():
        return None
    for record in read_records(run_dir / RECORDS):
        if isinstance(record, EventRecord) and record.name == "resumed":
            return Path(record.detail[ORIGIN]) if ORIGIN in record.detail else None
    return None


def resumed_event(resumed: Resumed, config: RunConfig, run_dir: Path) -> EventRecord:
    """From which checkpoint the run goes on, and which settings are no longer what they were."""
    detail: dict[str, object] = {"checkpoint": resumed.path.name}
    if not resumed.path.resolve().is_relative_to(run_dir.resolve()):
        detail[ORIGIN] = str(resumed.path.resolve())
    if changed := changed_settings(resumed.config_toml, config):
        detail["changed"] = changed
    return event(resumed.step, "resumed", **detail)


@contextmanager
def told_where_to_go_on(run_dir: Path) -> Iterator[None]:
    """Add to the death of a worker inside what the same command would do next."""
    try:
        yield
    except WorkerDiedError as error:
        kept = complete_checkpoints(run_dir)
        goes_on = (
            f"the same command goes on from its last checkpoint, {kept[-1].name}" if kept else ""
        )
        error.hint = goes_on or "there is no checkpoint yet: the same command begins again"
        raise


def read_start(start: Path, contract: dict[str, Any]) -> Resumed:
    """Read the checkpoint *start*, and where it is unusable say which one comes before it.

    Raises:
        CheckpointError: what ``resume_from`` raises.
    """
    try:
        return resume_from(start, contract)
    except CheckpointError as error:
        earlier = [one for one in complete_checkpoints(start.parents[1]) if one.name < start.name]
        if error.hint or not earlier:
            raise
        hint = f"remove that folder to go on from {earlier[-1].name}"
        raise CheckpointError(error.what, hint=hint) from error


def restore(resumed: Resumed, steps: Iterable[TrainStep], boundary: Boundary) -> None:
    """Put weights, moments and counters back; the sums wait until the warm-up is over."""
    with torch.no_grad():
        for step in steps:
            step.load(resumed.weights, resumed.state)
    progress = resumed.progress.model_dump()
    boundary.best_tau = progress.pop("best_tau")
    boundary.logbook.counters = Counters(**progress)
    boundary.tau, boundary.tau_step = resumed.tau, resumed.step
    boundary.last_saved = resumed.path


def changed_settings(before_toml: str, config: RunConfig) -> dict[str, str]:
    """Dotted keys whose value in *config* is not what it was, with both values."""
    before = dict(_leaves(tomllib.loads(before_toml)))
    now = dict(_leaves(tomllib.loads(to_toml(config))))
    return {
        key: f"{before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
