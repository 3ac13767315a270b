"""The events that a run puts into its records."""

from dflash.execution import process_seal
from dflash.pipeline.waiting import Waits
from dflash.records import EventRecord
from dflash.train.readiness import WarmRun


def event(step: int, name: str, **detail: object) -> EventRecord:
    """Something that happened after *step*."""
    return EventRecord(step=step, name=name, detail=detail)


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
