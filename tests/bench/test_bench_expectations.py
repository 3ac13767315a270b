"""``--expect``: what it is written in, where a mistake is, and how it is judged."""

import pytest
from bench_samples import estimate, measured, sample

from dflash.errors import UsageError
from dflash.measurement import Bench, Comparison, Estimate
from dflash_bench.expectations import judge
from dflash_bench.expressions import parse_expectation, parse_rule

MODES = ["eager", "compiled", "reduce-overhead", "warmed", "graphed"]


def states(text: str, bench: Bench | None = None) -> set[str]:
    return {each.state for each in judge(parse_expectation(text, [MODES]), bench or sample())}


def compared(one: str, other: str, ratio: Estimate) -> Comparison:
    start = "drafter-step made-up-3072 fixed"
    return Comparison(
        row=f"{start} {one}",
        baseline=f"{start} {other}",
        ratio=ratio,
        pairs=8,
        precision=0.01,
        verdict="unclear",
    )


def with_ratios(*comparisons: Comparison) -> Bench:
    rows = [row for row in sample().rows if row.shape == "made-up-3072" and row.lengths == "fixed"]
    return sample().model_copy(update={"rows": rows, "comparisons": list(comparisons)})


def test_a_speed_is_how_many_times_as_fast_the_first_is() -> None:
    bench = with_ratios(compared("graphed", "eager", Estimate(value=0.5, low=0.4, high=0.625)))
    assert states("graphed/eager >= 1.6", bench) == {"met"}
    assert states("graphed/eager >= 2", bench) == {"unclear"}
    assert states("graphed/eager >= 2.6", bench) == {"missed"}
    assert states("eager/graphed <= 62.5%", bench) == {"met"}
    assert states("eager / graphed<0.4", bench) == {"missed"}


def test_two_modes_are_compared_by_way_of_their_baseline() -> None:
    bench = with_ratios(
        compared("graphed", "eager", estimate(0.5, 0.003)),
        compared("warmed", "eager", estimate(0.8, 0.004)),
    )
    found = judge(parse_expectation("graphed/warmed >= 1.59", [MODES]), bench)
    assert [each.state for each in found] == ["met"]
    assert "1.6 (1.592 to 1.608)" in found[0].why  # half width: root of 3**2 + 4**2
    assert states("graphed/warmed >= 1.595", bench) == {"unclear"}
    assert states("graphed/graphed == 1", bench) == {"met"}
    assert states("graphed/warmed == 1.6001", bench) == {"unclear"}  # as well that as not
    assert states("graphed/warmed == 1.7", bench) == {"missed"}


def test_few_turns_leave_a_step_time_unclear() -> None:
    few = measured("graphed", turns_ms=[[100.0, 100.0]] * 3)
    bench = sample().model_copy(update={"rows": [few]})
    (found,) = judge(parse_expectation("graphed.step_ms < 140", [MODES]), bench)
    assert (found.state, "3 turns" in found.why) == ("unclear", True)


def test_a_figure_named_as_a_mode_is_the_figure() -> None:
    found = parse_expectation("captured == 4", [("plain", "captured")])
    assert (found.mode, found.figure) == (None, "captured")
    assert parse_expectation("captured.captured == 4", [("captured",)]).mode == "captured"
    assert parse_expectation("captured/plain > 1", [("plain", "captured")]).over == "plain"


def test_an_expectation_holds_in_every_shape_and_for_both_lengths() -> None:
    found = judge(parse_expectation("graphed/eager >= 1.5", [MODES]), sample())
    assert len(found) == 2
    assert {each.state for each in found} == {"met"}


def test_a_figure_is_judged_of_one_mode_or_of_all() -> None:
    bench = with_ratios()
    assert states("graphed.step_ms < 140", bench) == {"met"}
    assert states("graphed.step_ms < 100", bench) == {"missed"}
    assert "met" in states("step_ms < 140", bench)
    assert "missed" in states("step_ms < 140", bench)
    assert states("warmed.device_allocs == 0", bench) == {"met"}
    assert states("graphed.loss_against_eager <= 1e-3", bench) == {"met"}
    assert states("graphed.per_s > 24000", bench) == {"met"}


def test_a_loss_that_is_too_low_is_as_wrong_as_one_that_is_too_high() -> None:
    low = measured("graphed", loss_against_eager=-0.5)
    bench = sample().model_copy(update={"rows": [low]})
    assert states("loss_against_eager <= 1e-3", bench) == {"missed"}


def test_a_step_time_close_to_the_number_is_unclear() -> None:
    row = next(row for row in sample().rows if row.mode == "eager")
    assert row.step_ms is not None
    bench = sample().model_copy(update={"rows": [row]})
    assert states(f"eager.step_ms < {row.step_ms.median + 0.01:.3f}", bench) == {"unclear"}


def test_a_mode_that_failed_misses_and_one_that_was_skipped_says_nothing() -> None:
    assert states("reduce-overhead.step_ms < 1000") == {"missed"}
    assert states("reduce-overhead/eager > 1") == {"missed"}
    assert states("compiled/eager > 1") == {"unclear"}
    assert states("compiled.step_ms < 1000") == {"unclear"}


def test_what_speaks_of_nothing_that_was_measured_is_unclear() -> None:
    bench = with_ratios()
    assert states("graphed/eager > 1", bench) == {"unclear"}
    bench = bench.model_copy(update={"rows": []})
    assert states("step_ms < 1000", bench) == {"unclear"}


@pytest.mark.parametrize(
    ("text", "at", "why", "hint"),
    [
        ("", 1, "a mode or a figure is missing", "such as"),
        ("graphed", 8, "nothing is said about mode 'graphed'", "graphed/OTHER"),
        ("graphed/eagr >= 3", 9, "there is no mode 'eagr'", "did you mean eager?"),
        ("graphd/eager >= 3", 1, "there is no mode 'graphd'", "did you mean graphed?"),
        ("graphed/eager => 3", 15, "one of >= <= == > < is missing", "such as"),
        ("graphed/eager >= fast", 18, "a number is missing", "such as"),
        ("graphed/eager >= 3 x", 20, "'x' is too much", "such as"),
        ("graphed/ >= 3", 10, "a mode is missing", "such as"),
        ("step_m < 3", 1, "there is no figure 'step_m'", "did you mean step_ms?"),
        ("graphed.zzz < 3", 9, "there is no figure 'zzz'", "figures: step_ms"),
        ("3 < graphed", 1, "a mode or a figure is missing", "such as"),
    ],
)
def test_a_mistake_is_named_with_its_place(*, text: str, at: int, why: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_expectation(text, [MODES])
    assert caught.value.what == f"--expect {text!r}, at character {at}: {why}"
    assert caught.value.hint.startswith(hint)
    assert caught.value.exit_code == 2


def test_a_rule_is_about_a_change() -> None:
    rule = parse_rule("graphed.step_ms > +3%", MODES)
    assert (rule.mode, rule.figure, rule.limit, rule.relative) == ("graphed", "step_ms", 0.03, True)
    assert parse_rule("per_s<-2.5%", MODES).limit == pytest.approx(-0.025)
    assert not parse_rule("peak_reserved_gib > +0.5", MODES).relative


@pytest.mark.parametrize(
    ("text", "at", "why", "hint"),
    [
        ("step_ms > 3%", 11, "a change has a sign", "write +3%"),
        ("step_ms == +3%", 9, "a change is compared by > or <", "such as"),
        ("graphed/eager > +3%", 8, "nothing is said about mode 'graphed'", "graphed/OTHER"),
        ("step_ms > +3% or so", 15, "'or so' is too much", "such as"),
        ("step_mss > +3%", 1, "there is no figure 'step_mss'", "did you mean step_ms?"),
    ],
)
def test_a_mistake_in_a_rule_is_named_with_its_place(
    *, text: str, at: int, why: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule(text, MODES)
    assert caught.value.what == f"--fail-if {text!r}, at character {at}: {why}"
    assert caught.value.hint.startswith(hint)
