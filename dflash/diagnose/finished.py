"""What a finished or crashed run left behind, as the detectors of failure modes read it."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.diagnose.findings import Launch, RunDiagnosis, Suffered
from dflash.errors import DataError, UsageError
from dflash.records import EvalRecord, EventRecord, StepRecord, read_records

RECORDS, STACKS, ENVIRONMENT = "records.jsonl", "stacks.txt", "environment.json"
MAX_EVIDENCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Records, whatever text tells of its end (stacks, tracebacks, output), the environment."""

    records: tuple[StepRecord | EvalRecord | EventRecord, ...] = ()
    text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def evals(self) -> list[EvalRecord]:
        return [record for record in self.records if isinstance(record, EvalRecord)]

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


def read_run(run_dir: Path) -> FinishedRun:
    """Read a run folder; what is missing is left empty, a crash may have come before it.

    Raises:
        UsageError: there is no run in that folder.
        DataError: its records are none.
    """
    files = [run_dir / name for name in (RECORDS, STACKS, ENVIRONMENT)]
    if not run_dir.is_dir() or not any(path.exists() for path in files):
        raise UsageError(
            f"{run_dir} is no run folder: it has none of {RECORDS}, {STACKS}, {ENVIRONMENT}",
            hint="name the folder that dflash train --run-dir was given",
        )
    records, stacks, environment = files
    crashes = sorted(run_dir.glob("dflash-crash-*.txt"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (stacks, *crashes)
             if path.exists()]  # fmt: skip
    read = tuple(read_records(records)) if records.exists() else ()
    texts += [_words(record) for record in read if isinstance(record, EventRecord)]
    return FinishedRun(records=read, text="\n".join(texts), environment=_environment(environment))


def as_finished(launches: Iterable[Launch]) -> FinishedRun:
    """What launches of a failure mode left behind, in the place of a run's own end."""
    parts = [
        part
        for launch in launches
        for part in (launch.message, launch.traceback, launch.stacks, launch.stderr_tail)
    ]
    return FinishedRun(text="\n".join(parts))


def diagnose_run(run_dir: Path) -> RunDiagnosis:
    """Name what a run suffered from, by the slugs of failure modes.

    Raises:
        UsageError: there is no run in that folder.
        DataError: its records are none.
    """
    from dflash.diagnose.examine import remedy_name
    from dflash.failures import all_modes, page_of

    run = read_run(run_dir)
    suffered = []
    for mode in all_modes():
        lines = list(mode.detect(run))[:MAX_EVIDENCE] if mode.detect else []
        if lines:
            title, remedy = page_of(mode).title, remedy_name(mode)
            suffered.append(Suffered(slug=mode.slug, title=title, evidence=lines, remedy=remedy))
    return RunDiagnosis(run_dir=str(run_dir), suffered=suffered, notes=list(_notes(run)))


def _notes(run: FinishedRun) -> Iterator[str]:
    """What is no failure mode of ours, and yet says how the run ended."""
    for event in run.events("died"):
        yield f"it ended with {event.detail.get('error', 'an error')}"
    if not run.records:
        yield "it has no records: it ended before its first"


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
