"""Two benches beside each other: what changed, and when a rule is broken."""

import math

import pytest
from bench_pairs import MODES, bench, change, compared, timed
from bench_samples import estimate, failed, measured, skipped

from dflash.errors import UsageError
from dflash.measurement import Bench, Comparison, Estimate, Row
from dflash_bench.compare import compare_benches, is_judged
from dflash_bench.expressions import parse_rule


def test_what_did_not_change_is_the_same() -> None:
    found = compared(bench(timed("eager", 100, seed=1)), bench(timed("eager", 100, seed=2)))
    assert {each.verdict for each in found.changes} == {"same"}
    assert found.differences == found.notes == []
    assert {each.figure for each in found.changes} >= {"step_ms", "per_s", "peak_reserved_gib"}


def test_a_step_that_takes_longer_is_worse_and_a_higher_rate_is_better() -> None:
    before = bench(timed("eager", 100, seed=1, per_s=estimate(1000)))
    after = bench(timed("eager", 105, seed=2, per_s=estimate(1050)))
    found = compared(before, after)
    assert (change(found).verdict, change(found, "per_s").verdict) == ("worse", "better")
    ratio = change(found).ratio
    assert ratio is not None
    assert ratio.low < 1.05 < ratio.high
    back = compared(after, before)
    assert (change(back).verdict, change(back, "per_s").verdict) == ("better", "worse")


def test_a_rule_is_broken_only_where_the_interval_shows_it() -> None:
    before = bench(timed("eager", 100, seed=1))
    rule = "step_ms > +3%"
    worse = compared(before, bench(timed("eager", 105, seed=2)), rule)
    within = compared(before, bench(timed("eager", 102, seed=2)), rule)
    noisy = compared(before, bench(timed("eager", 105, seed=2, noise=0.1)), rule)
    assert change(worse).regression is True
    assert change(within).regression is False
    assert change(noisy).regression is None
    assert {each.rule for each in worse.changes if each.figure == "step_ms"} == {rule}


def test_a_rule_speaks_of_one_mode_or_of_all() -> None:
    before = bench(timed("eager", 100, seed=1), timed("graphed", 50, seed=2))
    after = bench(timed("eager", 110, seed=3), timed("graphed", 50, seed=4))
    everywhere = compared(before, after, "step_ms > +3%")
    assert [each.regression for each in everywhere.changes if each.rule] == [True, False]
    graphed = compared(before, after, "graphed.step_ms > +3%")
    assert [each.regression for each in graphed.changes if each.rule] == [False]


def test_memory_is_judged_by_its_value_and_in_its_unit() -> None:
    def reserved(gib: float) -> Bench:
        row = timed("eager", 100)
        assert row.memory is not None
        memory = row.memory.model_copy(update={"peak_reserved_gib": gib})
        return bench(row.model_copy(update={"memory": memory}))

    rules = ("peak_reserved_gib > +0.5", "peak_reserved_gib > +10%")
    found = compared(reserved(20), reserved(21), *rules)
    asked = [each for each in found.changes if each.rule]
    assert [(each.verdict, each.regression) for each in asked] == [
        ("worse", True),
        ("worse", False),
    ]


def test_allocations_where_there_were_none_break_any_limit() -> None:
    before = timed("eager", 100)
    assert before.memory is not None
    memory = before.memory.model_copy(update={"device_allocs": 3})
    after = before.model_copy(update={"memory": memory})
    found = compared(bench(before), bench(after), "device_allocs > +50%")
    assert change(found, "device_allocs").regression is True
    none = compared(bench(before), bench(before), "device_allocs > +50%")
    assert change(none, "device_allocs").regression is False


@pytest.mark.parametrize("rule", ["step_ms > +3", "step_ms > +3%", "step_ms > +0.5"])
def test_a_limit_in_the_figures_unit_is_as_sure_as_one_in_percent(rule: str) -> None:
    """At 100 ms the first two are the same; turns of 10 % noise know a step to some 8 %."""
    before = bench(timed("eager", 100, seed=1))
    worse = compared(before, bench(timed("eager", 105, seed=2)), rule)
    within = compared(before, bench(timed("eager", 100.2, seed=2)), rule)
    noisy = compared(before, bench(timed("eager", 105, seed=2, noise=0.1)), rule)
    found = [change(each).regression for each in (worse, within, noisy)]
    assert found == [True, False, None]


@pytest.mark.parametrize("rule", ["loss_against_eager > +0.01", "loss_against_eager > +50%"])
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_any_more_is_worse_and_breaks_any_limit(
    rule: str, lost: float
) -> None:
    kept, gone = (timed("graphed", 100, loss_against_eager=loss) for loss in (1e-6, lost))
    for before, after, verdict, broken in (
        (kept, gone, "worse", True),
        (gone, kept, "better", False),
        (gone, gone, "same", False),
    ):
        found = change(compared(bench(before), bench(after), rule), "loss_against_eager")
        assert (found.verdict, found.regression, found.ratio) == (verdict, broken, None)


@pytest.mark.parametrize("rule", ["loss_against_eager < -1%", "loss_against_eager < +0.5"])
def test_a_loss_that_is_nan_now_breaks_rules_of_either_side(rule: str) -> None:
    before = bench(timed("graphed", 100, loss_against_eager=0.001))
    after = bench(timed("graphed", 100, loss_against_eager=math.nan))
    found = compared(before, after, rule)
    assert change(found, "loss_against_eager").regression is True


def test_a_time_that_was_read_once_has_no_verdict_but_keeps_a_rule() -> None:
    before, after = timed("eager", 100), timed("eager", 100)
    assert after.start_up is not None
    start = after.start_up.model_copy(update={"first_step_s": after.start_up.first_step_s * 1.5})
    after = after.model_copy(update={"start_up": start})
    found = compared(bench(before), bench(after), "first_step_s > +20%")
    assert change(found, "first_step_s").verdict == "unclear"
    assert change(found, "first_step_s").regression is True


def test_three_turns_say_nothing() -> None:
    before, after = timed("eager", 100), timed("eager", 120)
    after = after.model_copy(update={"turns_ms": after.turns_ms[:3]})
    found = compared(bench(before), bench(after), "step_ms > +3%")
    assert (change(found).verdict, change(found).regression) == ("unclear", None)


def test_the_step_over_the_baselines_leaves_out_what_the_machine_did() -> None:
    def run(speed: float, ratio: Estimate) -> Bench:
        rows = timed("eager", 100 * speed, seed=1), timed("graphed", 50 * speed, seed=2)
        comparison = Comparison(
            row=rows[1].name,
            baseline=rows[0].name,
            ratio=ratio,
            pairs=12,
            precision=0.01,
            verdict="faster",
        )
        return bench(*rows, comparisons=[comparison])

    before = run(1.0, Estimate(value=0.5, low=0.4985, high=0.5015))
    slower_machine = run(1.06, Estimate(value=0.5, low=0.498, high=0.502))
    found = compared(before, slower_machine, "over_baseline > +2%")
    assert change(found).verdict == "worse"
    assert change(found, "over_baseline").verdict == "same"
    assert change(found, "over_baseline").regression is False
    ratio = change(found, "over_baseline").ratio
    assert ratio is not None
    assert ratio.high - 1 == pytest.approx(0.005, rel=0.02)  # the root of 0.3 and 0.4 % squared


def test_a_row_that_fails_now_is_a_regression_and_a_skipped_one_is_open() -> None:
    before = bench(timed("eager", 100), measured("warmed"))
    lost = failed().model_copy(update={"mode": "eager"})
    found = compared(before, bench(lost, measured("warmed")), "step_ms > +3%")
    assert found.changes[0].regression is True
    assert found.changes[0].after is None
    assert any("failed: RuntimeError" in note for note in found.notes)
    gone = skipped().model_copy(update={"mode": "eager"})
    found = compared(before, bench(gone, measured("warmed")), "step_ms > +3%")
    assert found.changes[0].regression is None


def test_a_row_or_a_figure_that_is_gone_leaves_the_rule_open() -> None:
    both = timed("eager", 100, seed=1), timed("warmed", 90, per_s=estimate(1000))
    gone = compared(bench(*both), bench(both[0]), "step_ms > +3%")
    asked = {each.row: (each.after, each.regression) for each in gone.changes if each.rule}
    assert asked[both[0].name][1] is False
    assert asked[both[1].name] == (None, None)
    named = compared(bench(*both), bench(both[0]), "warmed.step_ms > +3%")
    assert [each.regression for each in named.changes if each.rule] == [None]
    other = compared(bench(*both), bench(both[0]), "eager.step_ms > +3%")
    assert [each.regression for each in other.changes if each.rule] == [False]
    mute = both[1].model_copy(update={"per_s": None})
    figure = compared(bench(*both), bench(both[0], mute), "warmed.per_s < -3%")
    assert [each.regression for each in figure.changes if each.rule] == [None]


def test_a_row_that_is_lost_is_lost_to_its_ratio_too() -> None:
    rows = timed("eager", 100, seed=1), timed("warmed", 90, seed=2), timed("graphed", 50, seed=3)
    ratio = Estimate(value=0.5, low=0.49, high=0.51)

    def beside(row: Row) -> Comparison:
        return Comparison(
            row=row.name,
            baseline=rows[0].name,
            ratio=ratio,
            pairs=12,
            precision=0.01,
            verdict="faster",
        )

    before = bench(*rows, comparisons=[beside(rows[1]), beside(rows[2])])
    failing = failed().model_copy(update={"mode": "graphed"})
    after = bench(rows[0], rows[1], failing, comparisons=[beside(rows[1])])
    found = compared(before, after, "over_baseline > +3%")
    assert [each.regression for each in found.changes if each.rule] == [False, True]
    without_baseline = bench(rows[1], rows[2])
    found = compared(before, without_baseline, "over_baseline > +3%")
    assert [each.regression for each in found.changes if each.rule] == [None, None]


def test_rows_that_only_one_has_are_named() -> None:
    found = compared(
        bench(timed("eager", 100), timed("warmed", 90)),
        bench(timed("eager", 100), timed("graphed", 80)),
    )
    assert "only before has drafter-step made-up-3072 fixed warmed" in found.notes
    assert "only after has drafter-step made-up-3072 fixed graphed" in found.notes


def test_a_rule_about_what_nobody_measured_is_not_judged() -> None:
    one = bench(timed("eager", 100))
    rule = parse_rule("graphed.step_ms > +3%", MODES)
    found = compare_benches(one, one, rules=[rule])
    assert not is_judged(rule, found)
    assert any("nothing was judged by" in note for note in found.notes)


def test_benches_without_a_common_row_are_refused() -> None:
    with pytest.raises(UsageError, match="no measured row in common"):
        compared(bench(timed("eager", 100)), bench(timed("graphed", 100)))


@pytest.mark.parametrize(
    ("cached", "gib", "verdict"),
    [
        ((2, 6), 5.020, "unclear"),
        ((6, 2), 5.020, "unclear"),
        ((2, 2), 5.020, "worse"),
        ((2, 6), 5.100, "worse"),
        ((2, 6), 4.700, "better"),
        ((2, 6), 4.970, "same"),
        ((2, None), 5.020, "worse"),
    ],
)
def test_memory_that_reading_graphs_from_the_cache_can_move_is_no_news(
    cached: tuple[int, int | None], gib: float, verdict: str
) -> None:
    """4.961 and 5.020 GiB are one command's, with an empty compile cache and with a full one."""

    def run(cached: int | None, gib: float) -> Bench:
        row = measured("graphed")
        assert row.memory is not None
        assert row.graphs is not None
        memory = row.memory.model_copy(update={"peak_reserved_gib": gib})
        graphs = row.graphs.model_copy(update={"compiled": 7, "cached": cached})
        return bench(row.model_copy(update={"memory": memory, "graphs": graphs}))

    before, after = run(cached[0], 4.961), run(cached[1], gib)
    rule = "peak_reserved_gib > +1%"
    found = change(compared(before, after, rule), "peak_reserved_gib")
    assert found.verdict == verdict
    assert found.regression is (gib > 4.961 * 1.01)  # a rule is the user's own bound
