"""Two benches beside each other: what changed, and whether it breaks a rule."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from dflash.errors import UsageError
from dflash.measurement import Bench, Change, Changes, Estimate, Row
from dflash_bench.expressions import Rule
from dflash_bench.figures import FIGURES
from dflash_bench.sameness import differences, notes, refuse_others
from dflash_bench.statistics import MIN_PAIRS, compare_apart, verdict_of

ChangeVerdict = Literal["same", "better", "worse", "unclear"]

SHOWN = ("step_ms", "per_s", "peak_reserved_gib", "process_gib")
"""Figures that are compared without being asked for."""

TO_99 = 2.576 / 1.96
"""How much wider a 99 % interval is than a 95 % one."""


def compare_benches(
    before: Bench,
    after: Bench,
    *,
    names: tuple[str, str] = ("before", "after"),
    rules: Sequence[Rule] = (),
    precision: float = 0.01,
    other_machine: bool = False,
) -> Changes:
    """Compare every row that both have, by its name.

    Raises:
        UsageError: they did not measure the same thing, or a rule would judge two machines.
    """
    refuse_others(before, after, judged=bool(rules) and not other_machine)
    olds = {row.name: row for row in before.rows if row.state == "measured"}
    news = {row.name: row for row in after.rows}
    common = [(old, news[name]) for name, old in olds.items() if name in news]
    if not common:
        raise UsageError(
            f"{names[0]} and {names[1]} have no measured row in common",
            hint=f"rows: {_listed(olds)}; and {_listed(news)}",
        )
    changes = [
        change
        for old, new in common
        for change in _row_changes(old, new, rules, precision=precision)
    ]
    return Changes(
        before=_title(names[0], before),
        after=_title(names[1], after),
        differences=list(differences(before, after)),
        changes=changes,
        notes=[*notes(before, after, names=names), *_unjudged(rules, changes)],
    )


def _row_changes(
    old: Row, new: Row, rules: Sequence[Rule], *, precision: float
) -> Iterator[Change]:
    mine = [rule for rule in rules if rule.mode in (None, new.mode)]
    asked = dict.fromkeys([*SHOWN, *(rule.figure for rule in mine)])
    if new.state != "measured":
        for rule in [rule for rule in mine if FIGURES[rule.figure].read(old) is not None]:
            yield _lost(old, new, rule)
        return
    for name in asked:
        before, after = FIGURES[name].read(old), FIGURES[name].read(new)
        if before is None or after is None:
            continue
        change = Change(
            row=new.name,
            figure=name,
            before=before,
            after=after,
            ratio=_ratio(name, old, new),
            verdict="unclear",
        )
        few = FIGURES[name].kind == "steps" and change.ratio is None
        if not few:
            verdict = _verdict(change, precision=precision)
            change = change.model_copy(update={"verdict": verdict})
        rules_here = [rule for rule in mine if rule.figure == name]
        for rule in rules_here:
            broken = None if few else _broken(rule, change)
            yield change.model_copy(update={"rule": rule.text, "regression": broken})
        if not rules_here:
            yield change


def _lost(old: Row, new: Row, rule: Rule) -> Change:
    """A failure where there was a figure is a regression; a skipped row leaves the rule open."""
    failed = new.state == "failed"
    return Change(
        row=new.name,
        figure=rule.figure,
        before=FIGURES[rule.figure].read(old),
        verdict="worse" if failed else "unclear",
        regression=True if failed else None,
        rule=rule.text,
    )


def _ratio(name: str, old: Row, new: Row) -> Estimate | None:
    """After over before, with an interval where it has one; None where that takes more turns."""
    figure = FIGURES[name]
    before, after = figure.read(old), figure.read(new)
    if before is None or after is None or before <= 0 or after <= 0:
        return None
    value = after / before
    if figure.kind == "steps":
        few = min(len(old.turns_ms), len(new.turns_ms)) < MIN_PAIRS
        return None if few else compare_apart(new.turns_ms, old.turns_ms)
    if figure.kind == "rate" and old.per_s is not None and new.per_s is not None:
        down = TO_99 * _length(new.per_s.value / new.per_s.low, old.per_s.high / old.per_s.value)
        up = TO_99 * _length(new.per_s.high / new.per_s.value, old.per_s.value / old.per_s.low)
        return Estimate(value=value, low=value * math.exp(-down), high=value * math.exp(up))
    return Estimate(value=value, low=value, high=value)


def _length(one: float, other: float) -> float:
    """Of two independent errors, given as factors; a logarithm."""
    return math.hypot(math.log(one), math.log(other))


def _verdict(change: Change, *, precision: float) -> ChangeVerdict:
    figure, ratio = FIGURES[change.figure], change.ratio
    if ratio is None:
        moved = (change.after or 0.0) - (change.before or 0.0)
        if not moved:
            return "same"
        return "better" if (moved > 0) == figure.higher_is_better else "worse"
    found = verdict_of(ratio, precision=precision)
    if found in ("faster", "slower"):
        if figure.kind == "once":
            return "unclear"  # it knows nothing of its own noise
        return "better" if (found == "slower") == figure.higher_is_better else "worse"
    return "same" if found == "same" else "unclear"


def _broken(rule: Rule, change: Change) -> bool | None:
    """Whether the change is too much; None where it could as well be none at all."""
    if change.before is None or change.after is None:
        return None
    moved = change.after - change.before
    if not rule.relative:
        return rule.breaks(moved)
    if change.ratio is None:
        grown = math.copysign(math.inf, moved) if moved else 0.0  # from nothing
        return rule.breaks(moved / change.before if change.before else grown)
    ends = change.ratio.low - 1, change.ratio.high - 1
    if ends[0] <= 0 <= ends[1] and rule.breaks(ends[0]) != rule.breaks(ends[1]):
        return None
    return rule.breaks(change.ratio.value - 1)


def _unjudged(rules: Sequence[Rule], changes: Sequence[Change]) -> Iterator[str]:
    asked = {change.rule for change in changes}
    for rule in rules:
        if rule.text not in asked:
            yield f"nothing was judged by {rule.text!r}: no row of both has {rule.figure}"


def is_judged(rule: Rule, changes: Changes) -> bool:
    """Whether there was anything that *rule* speaks of."""
    return any(change.rule == rule.text for change in changes.changes)


def _title(name: str, bench: Bench) -> str:
    commit = f", commit {bench.commit}" if bench.commit else ""
    return f"{name}{commit}, {bench.date}"


def _listed(rows: dict[str, Row]) -> str:
    return ", ".join(rows) or "none"
