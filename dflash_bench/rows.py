"""From what a child answered to the row that everybody reads."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.measurement import Estimate, Failed, Memory, Row, StartUp, Verdict
from dflash_bench.cases._case import Case, Setting
from dflash_bench.child import Child
from dflash_bench.slugs import slug_of
from dflash_bench.statistics import rate, spread
from dflash_bench.subjects import Failure

ENOUGH_FOR_A_RATE = 2
"""Timed steps: one has no spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a row is told of the others: the matrix product's rate, the baseline, its memory."""

    matrix_tflops: float | None = None
    baseline: Child | None = None
    eager: Child | None = None
    process_gib: float | None = None
    """By NVML, at its peak while turns were taken."""
    note: str = ""
    """How it came to be measured, where that is not as the others were."""
    verdict: Verdict | None = None
    """On its step time against the baseline's; None where they were not compared."""


def has_a_rate(child: Child) -> bool:
    """Whether enough of its steps are timed that it is measured."""
    return sum(map(len, child.turns)) >= ENOUGH_FOR_A_RATE


def skipped_row(case: Case, setting: Setting, why: str) -> Row:
    """A row of what was not measured."""
    return Row(**_named(case, setting), state="skipped", why=why)


def row_name(case: Case, setting: Setting) -> str:
    """The name of the row of *setting*, whatever becomes of it."""
    return skipped_row(case, setting, "").name


def row_of(case: Case, setting: Setting, child: Child, *, beside: Beside) -> Row:
    """A row of what a child measured, whole or up to where it failed or was interrupted."""
    facts = child.facts
    failed = None if child.failure is None else failed_of(child.failure)
    times_ms = [time_ms for turn in child.turns for time_ms in turn]
    measured = failed is None and has_a_rate(child)
    loss, of_eager = facts.get("loss"), _loss_of(beside.eager)
    finite = loss is None or math.isfinite(loss)
    notes = [beside.note, "" if finite else f"its loss is {loss}", facts.get("unsettled", "")]
    return Row(
        **_named(case, setting),
        padded=facts.get("padded", False),
        state="measured" if measured else "failed" if failed is not None else "skipped",
        why="; ".join(filter(None, notes)) if measured or failed else _too_few(times_ms),
        failed=failed,
        turns_ms=child.turns,
        start_up=_start_up(child, beside),
        memory=_memory(case, setting, child, beside=beside),
        graphs=facts.get("graphs"),
        loss=loss,
        loss_against_eager=(loss - of_eager) / of_eager if loss and of_eager else None,
        more=facts.get("more", {}),
        **(_speed(case, setting, child, beside=beside) if times_ms else {}),
    )


def _too_few(times_ms: Sequence[float]) -> str:
    if not times_ms:
        return "interrupted before it was measured"
    return f"it has {len(times_ms)} timed step, and a rate takes {ENOUGH_FOR_A_RATE}"


def failed_of(failure: Failure) -> Failed:
    """The same with the failure mode that it is."""
    return Failed(
        type=failure.type,
        message=failure.message,
        during=failure.during,
        slug=slug_of(failure),
        traceback=failure.trace,
    )


def _named(case: Case, setting: Setting) -> dict[str, Any]:
    return {
        "case": case.name,
        "shape": setting.shape.name,
        "mode": setting.mode,
        "lengths": setting.lengths,
        "unit": case.unit,
    }


def _speed(case: Case, setting: Setting, child: Child, *, beside: Beside) -> dict[str, Any]:
    times_ms = [time_ms for turn in child.turns for time_ms in turn]
    found: dict[str, Any] = {
        "step_ms": spread(times_ms),
        "per_s": _rate(child) if has_a_rate(child) else None,
    }
    flop = case.flop(setting) if setting.lengths == "fixed" else None
    if flop is not None:
        found["model_tflops"] = flop / (statistics.median(times_ms) * 1e-3) / 1e12
        devices = set(case.devices(setting))
        if beside.matrix_tflops is not None and "cpu" not in devices:
            found["matrix_share"] = found["model_tflops"] / len(devices) / beside.matrix_tflops
    return found


def _rate(child: Child) -> Estimate | None:
    """Units a second; None where it is not known what every step was worth."""
    num = sum(map(len, child.turns))
    units = child.facts.get("units")
    worth = [units] * num if isinstance(units, int | float) else list(units or ())[:num]
    averaged = list(child.facts.get("averaged", [1.0] * num))[:num]
    if len(worth) < num or len(averaged) < num:
        return None
    of_each = iter(averaged)
    whole_ms = [[time_ms * next(of_each) for time_ms in turn] for turn in child.turns]
    return rate(whole_ms, [unit * many for unit, many in zip(worth, averaged, strict=True)])


def _start_up(child: Child, beside: Beside) -> StartUp | None:
    """What of it is known; None where it did not even build."""
    names = ("build_s", "warm_up_s", "compile_s", "capture_s", "first_steps_ms")
    known = {name: child.facts[name] for name in names if child.facts.get(name) is not None}
    if not known and not child.prepared_s:
        return None
    return StartUp(
        first_step_s=child.prepared_s or None,
        pays_back_after_steps=_pays_back(child, beside),
        **known,
    )


def _pays_back(child: Child, beside: Beside) -> float | None:
    """Steps after which the child has caught up with the baseline; None unless it is faster."""
    baseline = beside.baseline
    if baseline is None or beside.verdict != "faster":
        return None
    (own_ms, own_s), (their_ms, their_s) = _cost(child), _cost(baseline)
    if own_ms >= their_ms:
        return None
    return max(0.0, (own_s - their_s) / (their_ms - own_ms) * 1e3)


def _cost(child: Child) -> tuple[float, float]:
    """Milliseconds of a step, slow ones too, and seconds that all before the first timed one took
    too long."""
    step_ms = statistics.fmean(time_ms for turn in child.turns for time_ms in turn)
    later_ms = child.facts.get("first_steps_ms", [])[1:]
    return step_ms, child.prepared_s + sum(ms - step_ms for ms in later_ms) * 1e-3


def _memory(case: Case, setting: Setting, child: Child, *, beside: Beside) -> Memory | None:
    told: Memory | None = child.facts.get("memory")
    on_gpu = case.devices(setting)[0].startswith("cuda")
    planned = case.planned_gib(setting) if on_gpu else None
    held = (beside.process_gib, child.facts.get("process_gib"))
    process_gib = max((gib for gib in held if gib is not None), default=None)
    if told is None and planned is None and process_gib is None:
        return None
    known = {"planned_gib": planned, "process_gib": process_gib}
    new = {name: value for name, value in known.items() if value is not None}
    return (told or Memory()).model_copy(update=new)


def _loss_of(child: Child | None) -> float | None:
    return None if child is None else child.facts.get("loss")
