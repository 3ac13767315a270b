"""What a finished or crashed run left behind, as the detectors of failure modes read it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash.diagnose.findings import Launch
from dflash.errors import DataError, UsageError
from dflash.records import EvalRecord, EventRecord, StepRecord, read_records

RECORDS, STACKS, ENVIRONMENT = "records.jsonl", "stacks.txt", "environment.json"

AnyRecord = StepRecord | EvalRecord | EventRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What was counted between two looks at a program; memory is that of the second look.

    Attributes:
        when: the second look, in words: "step 30", "after 412 s".
        compilations: graphs, or frames compiled again; captures: of CUDA graphs.
        pace: how fast it was meanwhile, in words, or "".
        new_device_allocs: device allocations by device.
        allocated_gib: the most that was in use so far; reserved_gib: what the allocator holds.
    """

    when: str
    compilations: int = 0
    captures: int = 0
    pace: str = ""
    new_device_allocs: Mapping[str, int] = field(default_factory=dict)
    allocated_gib: Mapping[str, float] = field(default_factory=dict)
    reserved_gib: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Records, whatever text tells of its end (stacks, tracebacks, output), the environment.

    A program that writes no records may have been watched: ``watched`` is what it did again and
    again after its warm-up, ``num_skipped`` the graphs that torch did not capture for it.
    """

    records: tuple[AnyRecord, ...] = ()
    text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    watched: tuple[Interval, ...] = ()
    num_skipped: int = 0

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def evals(self) -> list[EvalRecord]:
        return [record for record in self.records if isinstance(record, EvalRecord)]

    @property
    def undisturbed(self) -> list[tuple[StepRecord, StepRecord]]:
        """Neighbouring step records between which nothing but training happened: no evaluation,
        which compiles, captures and allocates for itself, and not the first steps."""
        measured = [record.step for record in self.evals]
        return [
            (before, after)
            for before, after in pairwise(self.steps)
            if not any(before.step <= step <= after.step for step in measured)
        ]

    @property
    def steady(self) -> list[Interval]:
        """Intervals in which nothing was left to compile or capture, if all went well."""
        return [_interval(*pair) for pair in self.undisturbed] + list(self.watched)

    @property
    def settled(self) -> list[Interval]:
        """Intervals in which nothing was left to allocate, if all went well."""
        return [_interval(*pair) for pair in pairwise(self.steps[1:])] + list(self.watched)

    def events(self, name: str) -> list[EventRecord]:
        """Events of that name, in order."""
        found = [record for record in self.records if isinstance(record, EventRecord)]
        return [event for event in found if event.name == name]

    def lines_with(self, *words: str) -> Iterator[str]:
        """Lines of the text that hold any of *words*, each once."""
        lines = (line.strip() for line in self.text.splitlines())
        yield from dict.fromkeys(line for line in lines if any(word in line for word in words))

    @property
    def torch(self) -> str:
        """The version it ran with, or ""."""
        return str(self.environment.get("packages", {}).get("torch") or "")


def _interval(before: StepRecord, now: StepRecord) -> Interval:
    new = {
        device: count - before.device_allocs.get(device, 0)
        for device, count in now.device_allocs.items()
    }
    return Interval(
        when=f"step {now.step}",
        compilations=now.recompiles,
        captures=now.captures,
        pace=f"{now.step_s:.3f} s a step",
        new_device_allocs=new,
        allocated_gib=now.allocated_gib,
        reserved_gib=now.reserved_gib,
    )


def says(*words: str) -> Callable[[FinishedRun], Iterable[str]]:
    """A detector of lines that hold any of *words*, which must be the failure's own."""
    return lambda run: run.lines_with(*words)


def read_run(run_dir: Path) -> FinishedRun:
    """Read a run folder; what is missing is left empty, a crash may have come before it.

    Raises:
        UsageError: there is no run in that folder.
        DataError: its records are none.
    """
    records, stacks, environment = (run_dir / name for name in (RECORDS, STACKS, ENVIRONMENT))
    if not any(path.is_file() for path in (records, stacks, environment)):
        raise UsageError(
            f"{run_dir} is no run folder: it has none of {RECORDS}, {STACKS}, {ENVIRONMENT}",
            hint="name the folder that dflash train --run-dir was given",
        )
    read = _last_attempt(tuple(read_records(records)) if records.exists() else ())
    texts = [stacks, *sorted(run_dir.glob("dflash-crash-*.txt"))]
    told = [path.read_text(encoding="utf-8", errors="replace") for path in texts if path.exists()]
    told += [_words(record) for record in read if isinstance(record, EventRecord)]
    return FinishedRun(records=read, text="\n".join(told), environment=_environment(environment))


def as_finished(launches: Iterable[Launch]) -> FinishedRun:
    """What launches of a failure mode left behind, in the place of a run's own end."""
    parts = [
        part
        for launch in launches
        for part in (launch.message, launch.traceback, launch.stacks, launch.stderr_tail)
    ]
    return FinishedRun(text="\n".join(parts))


def _last_attempt(records: tuple[AnyRecord, ...]) -> tuple[AnyRecord, ...]:
    """Without the deaths of attempts after which the run was resumed."""
    names = [record.name if isinstance(record, EventRecord) else "" for record in records]
    resumed = max((place for place, name in enumerate(names) if name == "resumed"), default=0)
    return tuple(
        record for place, record in enumerate(records) if place >= resumed or names[place] != "died"
    )


def _words(event: EventRecord) -> str:
    return "\n".join(f"{event.name}.{name}: {value}" for name, value in event.detail.items())


def _environment(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    return read if isinstance(read, dict) else {}
