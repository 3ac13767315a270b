"""Whether the numbers of a bench that was read can be what a bench measured."""

import math
from collections.abc import Iterator

from pydantic import BaseModel

from dflash.measurement import Bench, Estimate, Spread

LARGEST = 1e18
"""No time, count, size or rate comes near; interval ends may, where there are few steps."""

MAY_BE_NAN = ("loss", "loss_against_eager")
"""What a mode computed, whatever that is."""

COUNTED = ("rows.", "comparisons.", "weather.")
"""Parts of a bench in which no other number is below 0."""

Numbers = Iterator[tuple[str, float]]


def unsound(bench: Bench) -> str:
    """The first number that no bench can have, with its place and the rule; "" if all can be."""
    rules = (
        _numbers(bench),
        _lines(bench),
        _counts(bench),
        _names(bench),
        _turns(bench),
        _spreads(bench),
        _intervals(bench),
        _devices(bench),
    )
    return next((problem for found in rules for problem in found), "")


def _numbers(bench: Bench) -> Iterator[str]:
    for place, value in _leaves("", bench):
        if place.rpartition(".")[2] in MAY_BE_NAN:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{place} is {value}, and must be a finite number"
        elif abs(value) > LARGEST and not place.endswith((".low", ".high")):
            yield f"{place} is above {LARGEST:g}"
        elif value < 0 and place.startswith(COUNTED) and ".turns_ms." not in place:
            yield f"{place} is {value}, and no bench counts or measures less than 0"


def _names(bench: Bench) -> Iterator[str]:
    """Rows that are not there, or twice, and shapes that are not there."""
    names = [row.name for row in bench.rows]
    for at, row in enumerate(bench.rows):
        if row.name in names[:at]:
            yield f"rows.{at} is the second one of {row.name}"
        if row.shape not in bench.shapes:
            yield f"shapes has no {row.shape}, at which rows.{at} was measured"
    for at, one in enumerate(bench.comparisons):
        for name in (one.row, one.baseline):
            if name not in names:
                yield f"comparisons.{at} is about {name}, which is no row"


def _lines(bench: Bench) -> Iterator[str]:
    """Names and versions stand in the middle of a sentence; an error's own words need not."""
    named: list[tuple[str, str | None]] = [("device", bench.device), ("commit", bench.commit)]
    named += [("environment.packages", name) for name in bench.environment.packages]
    named += [(f"environment.packages.{k}", v) for k, v in bench.environment.packages.items()]
    named += [("shapes", name) for name in bench.shapes]
    for at, row in enumerate(bench.rows):
        named += [(f"rows.{at}.{key}", getattr(row, key)) for key in ("case", "mode", "unit")]
    for place, name in named:
        if name is not None and "\n" in name:
            yield f"{place} is {name!r}, and must be one line"


def _counts(bench: Bench) -> Iterator[str]:
    """Parts that are more than their whole."""
    parts = (("cached", "compiled"), ("captured_late", "captured"))
    for at, row in enumerate(bench.rows):
        for part, whole in parts:
            few, most = getattr(row.graphs, part, None), getattr(row.graphs, whole, None)
            if few is not None and few > (most or 0):
                yield f"rows.{at}.graphs.{part} is {few}, and {whole} {most}"


def _leaves(place: str, value: object) -> Numbers:
    """Every number of the models and lists of *value*, by its dotted place."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(f"{place}.{name}" if place else name, getattr(value, name))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from _leaves(f"{place}.{at}", one)
    elif isinstance(value, int | float):
        yield place, value


def _turns(bench: Bench) -> Iterator[str]:
    for at, row in enumerate(bench.rows):
        for number, turn in enumerate(row.turns_ms):
            place = f"rows.{at}.turns_ms.{number}"
            if not turn:
                yield f"{place} is a turn without a step"
            yield from _not_above_zero(_leaves(place, turn))
        if row.state == "measured" and not row.turns_ms:
            yield f"rows.{at} was measured, and has no turns_ms"


def _spreads(bench: Bench) -> Iterator[str]:
    for at, row in enumerate(bench.rows):
        spread: Spread | None = row.step_ms
        place = f"rows.{at}.step_ms"
        if spread is None:
            if row.state == "measured":
                yield f"rows.{at} was measured, and has no step_ms"
            continue
        yield from _not_above_zero(_leaves(place, spread))
        if not spread.p10 <= spread.median <= spread.p90 <= spread.max:
            yield f"{place} is out of order: p10, median, p90 and max rise"


def _intervals(bench: Bench) -> Iterator[str]:
    """Of rates and of ratios; an exponent, or what measuring costs, may as well be negative."""
    found: list[tuple[str, Estimate | None]] = [
        (f"rows.{at}.per_s", row.per_s) for at, row in enumerate(bench.rows)
    ]
    found += [(f"comparisons.{at}.ratio", one.ratio) for at, one in enumerate(bench.comparisons)]
    for place, one in found:
        if one is None:
            continue
        yield from _not_above_zero(_leaves(place, one))
        if not one.low <= one.value <= one.high:
            yield f"{place} is {one.value:g}, outside of its interval {one.low:g} to {one.high:g}"


def _not_above_zero(numbers: Numbers) -> Iterator[str]:
    return (f"{place} is {value}, and must be above 0" for place, value in numbers if value <= 0)


def _devices(bench: Bench) -> Iterator[str]:
    if not isinstance(bench.options.get("devices", []), list):
        yield "options.devices is no list"
