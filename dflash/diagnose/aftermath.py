"""``dflash diagnose run``: asks every failure mode whether a finished run suffered from it."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from dflash.diagnose.examine import remedy_name
from dflash.diagnose.findings import RunDiagnosis, Suffered
from dflash.diagnose.finished import FinishedRun, read_run
from dflash.failures import all_modes, page_of

MAX_EVIDENCE = 4


def diagnose_run(run_dir: Path) -> RunDiagnosis:
    """Name what a run suffered from, by the slugs of failure modes.

    Raises:
        UsageError: there is no run in that folder.
        DataError: its records are none.
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
    """What is no failure mode of ours, and yet says how the run ended."""
    for event in run.events("died"):
        yield f"it ended after step {event.step} with {event.detail.get('error', 'an error')}"
    if not run.records:
        yield "it has no records: it ended before its first"
