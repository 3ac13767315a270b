"""The events that a run puts into its records."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dflash.errors import DflashError
from dflash.execution import process_seal
from dflash.pipeline.waiting import Waits
from dflash.records import EventRecord
from dflash.train.readiness import WarmRun

MAX_TRACEBACK_CHARS = 20_000


def event(step: int, name: str, **detail: object) -> EventRecord:
    """Something that happened after *step*."""
    return EventRecord(step=step, name=name, detail=detail)


@contextmanager
def last_words(reached: Callable[[], int], emit: Callable[[EventRecord], None]) -> Iterator[None]:
    """Record what ends a run, whole, so that ``dflash diagnose run`` can read it."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
        told = {"error": f"{type(error).__name__}: {error}", "traceback": text}
        with suppress(DflashError):  # a full disk may be what ends it
            emit(event(reached(), "died", **told))
        raise


def warmed_up(step: int, warm: WarmRun, *, elapsed_s: float) -> EventRecord:
    """Everything is compiled and captured: in which mode, why, and what it took."""
    mode = warm.ready.choice
    reports = [runner.report.as_record() for runner in warm.ready.runners]
    took = {"elapsed_s": round(elapsed_s, 3), "drafters": reports}
    return event(step, "warm_up", mode=mode.mode, why=mode.why, **took)


def entered(step: int, warm: WarmRun) -> EventRecord:
    """Every drafter's thread has taken its runner over: what it found there."""
    reports = [runner.report.as_record() for runner in warm.ready.runners]
    return event(step, "entered", sealed=process_seal().closed, drafters=reports)


def waits_detail(waits: Waits) -> dict[str, float]:
    """Who waited for whom, for a record."""
    return {
        "elapsed_s": round(waits.elapsed_s, 3),
        "target_for_slot_s": round(waits.target_for_slot_s, 3),
        "drafter_for_features_s": round(waits.drafter_for_features_s, 3),
        "target_for_data_s": round(waits.target_for_data_s, 3),
    }
