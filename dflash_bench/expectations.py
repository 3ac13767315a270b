"""Whether a bench is what was expected of it, judged by intervals."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dflash.measurement import Bench, Comparison, Estimate, Row
from dflash_bench.expressions import Expectation
from dflash_bench.figures import FIGURES
from dflash_bench.statistics import MIN_PAIRS, exp, step_interval

State = Literal["met", "missed", "unclear"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one expectation on one row, or on two; ``why`` has the figures."""

    text: str
    state: State
    why: str


def judge(expectation: Expectation, bench: Bench) -> list[Outcome]:
    """Hold *bench* to one expectation, everywhere it applies.

    Met or missed only where the whole interval says so. A mode that failed misses; one that the
    expectation names and that was skipped leaves it unclear.
    """
    text = expectation.text
    if expectation.over is not None:
        found = list(_speeds(expectation, bench))
    else:
        found = list(_figures(expectation, bench))
    return found or [Outcome(text, "unclear", "nothing was measured that it speaks of")]


def _speeds(wanted: Expectation, bench: Bench) -> Iterator[Outcome]:
    for group in _groups(bench).values():
        one, other = group.get(wanted.mode or ""), group.get(wanted.over or "")
        if one is None or other is None:
            continue
        bad = [_unmeasured(wanted, row) for row in (one, other) if row.state != "measured"]
        if bad:
            yield min(bad, key=lambda outcome: outcome.state != "missed")
            continue
        times = _ratio(one.name, other.name, bench.comparisons)
        if times is None:
            yield Outcome(wanted.text, "unclear", f"{one.name}: too few turns to compare")
            continue
        speed = Estimate(value=1 / times.value, low=1 / times.high, high=1 / times.low)
        where = f"{one.case} {one.shape} {one.lengths}"
        yield _judged(wanted, speed, where=where)


def _figures(wanted: Expectation, bench: Bench) -> Iterator[Outcome]:
    for row in bench.rows:
        if wanted.mode not in (None, row.mode) or (wanted.mode is None and row.state == "skipped"):
            continue
        if row.state != "measured":
            yield _unmeasured(wanted, row)
            continue
        value = FIGURES[wanted.figure or ""].read(row)
        if value is None:
            if wanted.mode is not None:
                why = f"{row.name}: it has no {wanted.figure} here"
                yield Outcome(wanted.text, "unclear", why)
            continue
        found = _interval(row, wanted.figure or "", value)
        if found is None:
            why = f"{row.name}: {len(row.turns_ms)} turns; an interval takes {MIN_PAIRS}"
            yield Outcome(wanted.text, "unclear", why)
            continue
        yield _judged(wanted, found, where=row.name)


def _interval(row: Row, figure: str, value: float) -> Estimate | None:
    """None where it takes more turns to have one."""
    if figure == "per_s" and row.per_s is not None:
        return row.per_s
    if figure == "step_ms":
        return step_interval(row.turns_ms, median=value)
    return Estimate(value=value, low=value, high=value)


def _judged(wanted: Expectation, found: Estimate, *, where: str) -> Outcome:
    ends = {wanted.holds(end) for end in (found.low, found.value, found.high)}
    if wanted.comparison == "==" and found.low <= wanted.number <= found.high > found.low:
        ends = {True, False}
    state: State = "unclear" if len(ends) > 1 else "met" if ends == {True} else "missed"
    figures = f"{found.value:.4g}"
    if found.low != found.high:
        figures += f" ({found.low:.4g} to {found.high:.4g})"
    return Outcome(wanted.text, state, f"{where}: {figures}")


def _unmeasured(wanted: Expectation, row: Row) -> Outcome:
    if row.failed is not None:
        why = f"{row.failed.type} during {row.failed.during}"
        return Outcome(wanted.text, "missed", f"{row.name}: {why}")
    return Outcome(wanted.text, "unclear", f"{row.name}: {row.why or row.state}")


def _groups(bench: Bench) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Rows by mode, for every case, shape and lengths."""
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in bench.rows:
        groups.setdefault((row.case, row.shape, row.lengths), {})[row.mode] = row
    return groups


def _ratio(one: str, other: str, comparisons: list[Comparison]) -> Estimate | None:
    """Step time of *one* over *other*'s, also by way of a baseline that both were held against."""
    if one == other:
        return Estimate(value=1.0, low=1.0, high=1.0)
    ratios = {(each.row, each.baseline): each.ratio for each in comparisons}
    for each in comparisons:
        ratios.setdefault((each.baseline, each.row), _inverse(each.ratio))
    if (one, other) in ratios:
        return ratios[one, other]
    for each in comparisons:
        ways = ratios.get((one, each.baseline)), ratios.get((each.baseline, other))
        if ways[0] is not None and ways[1] is not None:
            return _product(ways[0], ways[1])
    return None


def _inverse(ratio: Estimate) -> Estimate:
    return Estimate(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)


def _product(one: Estimate, other: Estimate) -> Estimate:
    """Of two ratios whose errors are taken as independent: the baseline's own is counted twice."""
    value = one.value * other.value
    down = math.hypot(*(math.log(each.value / each.low) for each in (one, other)))
    up = math.hypot(*(math.log(each.high / each.value) for each in (one, other)))
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))
