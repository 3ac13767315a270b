"""Reads the folder of a finished or crashed run, damaged files too as far as they go."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dflash.diagnose.finished import AnyRecord, FinishedRun, is_event, resumed_at
from dflash.errors import DataError, UsageError, reason, remedy
from dflash.records import EventRecord, StepRecord, read_records

RECORDS, STACKS, ENVIRONMENT = "records.jsonl", "stacks.txt", "environment.json"
CRASHES = "dflash-crash-*.txt"


def files_of(run_dir: Path) -> list[Path]:
    """What ``read_run`` reads of a folder, whether it is there or not."""
    return [run_dir / RECORDS, run_dir / STACKS, run_dir / ENVIRONMENT, *run_dir.glob(CRASHES)]


def read_run(run_dir: Path) -> FinishedRun:
    """Read a run folder; what is missing is left empty, a crash may have come before it.

    A file that a crash left half written is read as far as it goes, and named in ``unread``.

    Raises:
        UsageError: there is no run in that folder, it cannot be read, or its records are none.
    """
    names = _names(run_dir)
    if not names & {RECORDS, STACKS, ENVIRONMENT}:
        raise UsageError(
            f"{run_dir} is no run folder: it has none of {RECORDS}, {STACKS}, {ENVIRONMENT}",
            hint="name the folder that dflash train --run-dir was given",
        )
    records, cut = _records(run_dir / RECORDS) if RECORDS in names else ((), "")
    environment, torn = _environment(run_dir / ENVIRONMENT) if ENVIRONMENT in names else ({}, "")
    read = _last_attempt(records)
    stacks = _text(run_dir / STACKS) if STACKS in names and _wrote_stacks(read) else ""
    crashes = sorted(name for name in names if fnmatch(name, CRASHES))
    told = [stacks, *(_text(run_dir / name) for name in crashes)]
    told += [_words(record) for record in read if isinstance(record, EventRecord)]
    return FinishedRun(
        records=read,
        text="\n".join(told),
        environment=environment,
        stacks=stacks,
        unread=tuple(filter(None, (cut, torn))),
        cut=bool(cut),
    )


def _last_attempt(records: tuple[AnyRecord, ...]) -> tuple[AnyRecord, ...]:
    """Without the deaths of attempts after which the run was resumed."""
    begun = resumed_at(records)
    before = (record for record in records[:begun] if not is_event(record, "died"))
    return (*before, *records[begun:])


def _words(event: EventRecord) -> str:
    return "\n".join(f"{event.name}.{name}: {value}" for name, value in event.detail.items())


def _wrote_stacks(records: tuple[AnyRecord, ...]) -> bool:
    """Whether stacks in the folder are the last attempt's: its steps begin with an empty file, and
    one that has ended before them leaves those of the attempt before in place."""
    attempt = records[resumed_at(records) :]
    return not records or any(
        isinstance(one, StepRecord) or is_event(one, "warm_up") for one in attempt
    )


def _names(run_dir: Path) -> set[str]:
    """What is in the folder; nothing where there is none."""
    try:
        return {path.name for path in run_dir.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise _unreadable(run_dir, error) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UsageError:
    what_to_do = "get the right to read it" if isinstance(error, PermissionError) else remedy(error)
    return UsageError(f"{path} cannot be read: {reason(error)}", hint=what_to_do)


def _records(path: Path) -> tuple[tuple[AnyRecord, ...], str]:
    """Records as far as they can be read, and where that ends if it is not the end of the file."""
    content = _text(path)
    read: list[AnyRecord] = []
    try:
        read.extend(read_records(path))  # keeps what comes before an error
    except DataError as error:
        if read:
            return tuple(read), f"{error.what}; that line and those behind it were not read"
        raise _no_records(error.what) from error
    if not read and content and not content.startswith("{"):  # else the first line may be torn
        raise _no_records(f"{path} holds no records of a run")
    return tuple(read), ""


def _no_records(what: str) -> UsageError:
    return UsageError(
        what,
        hint="name the folder that dflash train --run-dir was given; if it is this one, move"
        f" {RECORDS} away to have the rest of it diagnosed",
    )


def _environment(path: Path) -> tuple[dict[str, Any], str]:
    """What it ran on, or why that cannot be told."""
    try:
        read = json.loads(_text(path))
    except ValueError as error:
        return {}, f"{path.name} is damaged, so the rest was read without it: no JSON: {error}"
    if not isinstance(read, dict):
        return {}, f"{path.name} is damaged, so the rest was read without it: no JSON object"
    return read, ""
