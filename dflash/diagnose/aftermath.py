"""``dflash diagnose run``: asks every failure mode whether a finished run suffered from it."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from dflash.diagnose.examine import remedy_name
from dflash.diagnose.findings import RunDiagnosis, Suffered
from dflash.diagnose.finished import FinishedRun, is_event
from dflash.diagnose.run_folder import STACKS, read_run
from dflash.failures import all_modes, page_of

MAX_EVIDENCE = 4
FATAL = re.compile(r"^(?:Fatal Python error: .*|Timeout \(\d.*)", re.MULTILINE)
"""How faulthandler begins: with the signal, or because even the main thread could not run."""
ENDS = ("died", "stopped", "waits")
"""Events of an end: by an error, by a signal, and of who waited for whom while it trained."""
CURRENT = re.compile(r"^Current thread (\S+).*\n\s*(.*)", re.MULTILINE)


def diagnose_run(run_dir: Path) -> RunDiagnosis:
    """Name what a run suffered from, by the slugs of failure modes.

    Raises:
        UsageError: there is no run in that folder, it cannot be read, or its records are none.
    """
    run = read_run(run_dir)
    found = what_it_suffered(lambda _slug: run)
    return RunDiagnosis(run_dir=str(run_dir), suffered=found, notes=list(_notes(run)))


def what_it_suffered(run_for: Callable[[str], FinishedRun]) -> list[Suffered]:
    """Ask every failure mode that has a detector; ``run_for(slug)`` is what it may look at."""
    suffered = []
    for mode in all_modes():
        lines = list(islice(mode.detect(run_for(mode.slug)), MAX_EVIDENCE)) if mode.detect else []
        if lines:
            told = {"title": page_of(mode).title, "remedy": remedy_name(mode)}
            suffered.append(Suffered(slug=mode.slug, evidence=lines, **told))
    return suffered


def _notes(run: FinishedRun) -> Iterator[str]:
    """What is no failure mode of ours, and yet says how the run ended; and what was not read."""
    for event in run.events("died"):
        yield f"it ended after step {event.step} with {event.detail.get('error', 'an error')}"
    if not run.records:
        yield "it has no records: it ended before its first"
    fatal = FATAL.search(run.stacks)
    if fatal and not run.events("died"):
        yield _fatal_note(fatal)
    elif run.records and not run.cut and not _has_ended(run):
        yield (
            f"it ended without a word after step {run.records[-1].step}: killed, stopped at once by"
            " a second signal, or still running; dmesg tells whether the kernel killed it for want"
            " of memory"
        )
    yield from run.unread


def _fatal_note(fatal: re.Match[str]) -> str:
    current = CURRENT.search(fatal.string, fatal.end())
    where = "no thread of Python was current"
    if current:
        where = f"its current thread, {current[1]}, was at {current[2].rstrip()}"
    return f"the process died of {fatal[0].rstrip()!r}; {where}; all stacks are in {STACKS}"


def _has_ended(run: FinishedRun) -> bool:
    """Whether the last attempt wrote down its own end, or had nothing left to do.

    One that only makes the evaluation that an earlier one owed writes nothing behind it, and one
    that finds every step made writes nothing at all.
    """
    if any(is_event(record, *ENDS) for record in run.attempt):
        return True
    asked = _steps_asked(run.environment.get("run"))
    done = [run.events("checkpoint"), run.evals or run.events("checkpoint")]
    return asked is not None and all(
        max((one.step for one in records), default=0) >= asked for records in done
    )


def _steps_asked(chosen: object) -> int | None:
    """After how many steps it should end, by what its environment says of the *chosen*."""
    if not isinstance(chosen, dict):
        return None
    words = " ".join(map(str, chosen.get("command") or ()))
    limits = [chosen.get("num_steps"), *map(int, re.findall(r"--max-steps[ =](\d+)", words))]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)
