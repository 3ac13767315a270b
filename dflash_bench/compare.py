"""Two benches beside each other: what changed, and whether it breaks a rule."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dflash.errors import UsageError
from dflash.measurement import Bench, Change, Changes, Estimate, Row
from dflash_bench.expressions import OVER_BASELINE, Rule
from dflash_bench.figures import FIGURES
from dflash_bench.sameness import differences, notes, refuse_others
from dflash_bench.statistics import MIN_PAIRS, compare_apart, exp, verdict_of

ChangeVerdict = Literal["same", "better", "worse", "unclear"]

SHOWN = ("step_ms", OVER_BASELINE, "per_s", "peak_reserved_gib", "process_gib")
"""Figures that are compared without being asked for."""

COMPILING_MOVES = 0.02
"""Up to which GPU memory that has moved, in a row whose graphs were compiled on one side and read
from torch's compile cache on the other, is no news. One command with an empty cache and with a full
one, on an H200 at the shape smollm2: 4.344 and 4.402 GiB of graphs, 4.961 and 5.020 reserved, the
same in two pairs of runs, and no mode moved by more."""

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

    What a rule speaks of in *before* and *after* has no more leaves the rule open; a row that
    failed there breaks it.

    Raises:
        UsageError: they did not measure the same thing, or a rule would judge two machines.
    """
    refuse_others(before, after, judged=bool(rules) and not other_machine)
    olds = {row.name: row for row in before.rows if row.state == "measured"}
    news = {row.name: row for row in after.rows}
    if not olds.keys() & news.keys():
        raise UsageError(
            f"{names[0]} and {names[1]} have no measured row in common",
            hint=f"rows: {_listed(olds)}; and {_listed(news)}",
        )
    changes = [
        change
        for name, old in olds.items()
        for change in _row_changes(
            *_sides((old, news.get(name)), (before, after)), rules, precision=precision
        )
    ]
    return Changes(
        before=_title(names[0], before),
        after=_title(names[1], after),
        differences=list(differences(before, after)),
        changes=changes,
        notes=[*notes(before, after, names=names), *_unjudged(rules, changes)],
    )


class _Side(NamedTuple):
    """A row, and how it compares with a baseline that both benches have.

    Where they share none, the earlier side has its own, and the later one nothing. The later side
    has no row where it vanished.
    """

    row: Row | None
    over_baseline: Estimate | None

    def read(self, figure: str) -> float | None:
        if self.row is None or self.row.state != "measured":
            return None
        if figure == OVER_BASELINE:
            return None if self.over_baseline is None else self.over_baseline.value
        return FIGURES[figure].read(self.row)


def _sides(rows: tuple[Row, Row | None], benches: tuple[Bench, Bench]) -> tuple[_Side, _Side]:
    before, after = (
        {each.baseline: each.ratio for each in bench.comparisons if each.row == rows[0].name}
        for bench in benches
    )
    shared = next((name for name in before if name in after), next(iter(before), ""))
    return _Side(rows[0], before.get(shared)), _Side(rows[1], after.get(shared))


def _row_changes(
    old: _Side, new: _Side, rules: Sequence[Rule], *, precision: float
) -> Iterator[Change]:
    assert old.row is not None, "only a row of the later bench can have vanished"
    mine = [rule for rule in rules if rule.mode in (None, old.row.mode)]
    for name in dict.fromkeys([*SHOWN, *(rule.figure for rule in mine)]):
        before, after = old.read(name), new.read(name)
        if before is None:
            continue
        rules_here = [rule for rule in mine if rule.figure == name]
        if after is None:
            yield from (_lost(old, new, rule) for rule in rules_here)
            continue
        change = Change(
            row=old.row.name,
            figure=name,
            before=before,
            after=after,
            ratio=_ratio(name, old, new),
            verdict="unclear",
        )
        few = name == "step_ms" and change.ratio is None
        if not few:
            counts = _num_compiled(old.row), _num_compiled(new.row)
            alike = None in counts or counts[0] == counts[1]
            verdict = _verdict(change, precision=precision, compiled_alike=alike)
            change = change.model_copy(update={"verdict": verdict})
        for rule in rules_here:
            broken = None if few else _broken(rule, change)
            yield change.model_copy(update={"rule": rule.text, "regression": broken})
        if not rules_here:
            yield change


def _lost(old: _Side, new: _Side, rule: Rule) -> Change:
    """A failure where there was a figure is a regression; a row that was skipped, has vanished, or
    has no such figure any more leaves the rule open."""
    assert old.row is not None, "it had a figure"
    failed = new.row is not None and new.row.state == "failed"
    return Change(
        row=old.row.name,
        figure=rule.figure,
        before=old.read(rule.figure),
        verdict="worse" if failed else "unclear",
        regression=True if failed else None,
        rule=rule.text,
    )


def _ratio(name: str, old: _Side, new: _Side) -> Estimate | None:
    """After over before, with an interval where it has one; None where that takes more turns."""
    before, after = old.read(name), new.read(name)
    if before is None or after is None or not (0 < before < math.inf and 0 < after < math.inf):
        return None
    assert old.row is not None, "it has a figure"
    assert new.row is not None, "it has a figure"
    if name == "step_ms":
        turns = new.row.turns_ms, old.row.turns_ms
        return None if min(map(len, turns)) < MIN_PAIRS else compare_apart(*turns)
    if name == OVER_BASELINE and old.over_baseline and new.over_baseline:
        return _quotient(new.over_baseline, old.over_baseline, wider=1.0)
    if name == "per_s" and old.row.per_s and new.row.per_s:
        return _quotient(new.row.per_s, old.row.per_s, wider=TO_99)
    return Estimate(value=after / before, low=after / before, high=after / before)


def _quotient(one: Estimate, other: Estimate, *, wider: float) -> Estimate:
    """Of two independent estimates whose intervals are made so many times as wide."""
    down = wider * _length(one.value / one.low, other.high / other.value)
    up = wider * _length(one.high / one.value, other.value / other.low)
    value = one.value / other.value
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))


def _length(one: float, other: float) -> float:
    """Of two independent errors, given as factors; a logarithm."""
    return math.hypot(math.log(one), math.log(other))


def _num_compiled(row: Row | None) -> int | None:
    """Graphs that were compiled, not read from the cache; None where nobody counted."""
    graphs = None if row is None else row.graphs
    if graphs is None or graphs.compiled is None or graphs.cached is None:
        return None
    return graphs.compiled - graphs.cached


def _verdict(change: Change, *, precision: float, compiled_alike: bool) -> ChangeVerdict:
    figure, ratio = FIGURES.get(change.figure), change.ratio
    higher_is_better = figure is not None and figure.higher_is_better
    if ratio is None:
        moved = _moved(change.before or 0.0, change.after or 0.0)
        if not moved:
            return "same"
        return "better" if (moved > 0) == higher_is_better else "worse"
    found = verdict_of(ratio, precision=precision)
    if found in ("faster", "slower"):
        if figure is not None and figure.read_once:
            return "unclear"  # it knows nothing of its own noise
        moved = figure is not None and figure.moved_by_compiling and not compiled_alike
        if moved and abs(math.log(ratio.value)) <= math.log1p(COMPILING_MOVES):
            return "unclear"
        return "better" if (found == "slower") == higher_is_better else "worse"
    return "same" if found == "same" else "unclear"


def _moved(before: float, after: float) -> float:
    """After less before; a loss that is no number any more has moved as far as can be."""
    if math.isnan(after):
        return 0.0 if math.isnan(before) else math.inf
    if math.isnan(before):
        return -math.inf
    return 0.0 if before == after else after - before


def _broken(rule: Rule, change: Change) -> bool | None:
    """Whether the change is too much; None where it could as well be none at all."""
    if change.before is None or change.after is None:
        return None
    if math.isnan(change.after):
        return not math.isnan(change.before)
    moved = _moved(change.before, change.after)
    if change.ratio is None:
        if not rule.relative:
            return rule.breaks(moved)
        grown = math.copysign(math.inf, moved) if moved else 0.0  # from nothing
        return rule.breaks(moved / change.before if change.before else grown)
    of = 1.0 if rule.relative else change.before
    ends = (change.ratio.low - 1) * of, (change.ratio.high - 1) * of
    if ends[0] <= 0 <= ends[1] and rule.breaks(ends[0]) != rule.breaks(ends[1]):
        return None
    return rule.breaks(change.ratio.value - 1 if rule.relative else moved)


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
