"""The figures that are made of step times, against oracles written as loops."""

import math
import random
from statistics import quantiles

import pytest

from dflash.measurement import Estimate
from dflash_bench.statistics import (
    compare_apart,
    compare_turns,
    fit_exponent,
    is_enough,
    rate,
    slow_steps_count,
    spread,
    step_interval,
    verdict_of,
)

Turns = list[list[float]]


def turns(
    median_ms: float, *, seed: int, count: int = 12, steps: int = 9, noise: float = 0.004
) -> Turns:
    source = random.Random(seed)
    return [
        [median_ms * math.exp(source.gauss(0, noise)) for _ in range(steps)] for _ in range(count)
    ]


def middle(values: list[float]) -> float:
    """Mean of what is left when a quarter is taken off each end."""
    ordered = sorted(values)
    for _ in range(len(values) // 4):
        del ordered[0], ordered[-1]
    return sum(ordered) / len(ordered)


def test_a_ratio_is_the_middle_of_the_pairs_of_turns() -> None:
    one, other = turns(3, seed=1), turns(2, seed=2)
    logs = [math.log(middle(a) / middle(b)) for a, b in zip(one, other, strict=True)]
    ratio, _ = compare_turns(one, other, precision=0.01)
    assert ratio.value == pytest.approx(math.exp(middle(logs)))
    assert ratio.low < ratio.value < ratio.high


def test_the_inverse_ratio_is_the_inverse() -> None:
    one, other = turns(3, seed=1), turns(2, seed=2)
    ratio, found = compare_turns(one, other, precision=0.01)
    inverse, opposite = compare_turns(other, one, precision=0.01)
    assert inverse.value == pytest.approx(1 / ratio.value)
    assert inverse.low == pytest.approx(1 / ratio.high, rel=1e-3)
    assert (found, opposite) == ("slower", "faster")


def test_the_same_numbers_and_seed_give_the_same_interval() -> None:
    one, other = turns(3, seed=1), turns(2, seed=2)
    assert compare_turns(one, other, precision=0.01) == compare_turns(one, other, precision=0.01)


def test_drift_that_both_see_is_not_in_the_interval() -> None:
    climb = [1.05**number for number in range(12)]
    one, other = ([[10 * up, 10 * up, 10 * up] for up in climb] for _ in range(2))
    ratio, found = compare_turns(one, other, precision=0.01)
    assert ratio.low == pytest.approx(ratio.high)
    assert found == "same"


def test_a_trend_within_a_round_cancels_between_a_b_and_b_a() -> None:
    """Every turn 1 % slower than the one before: A B B A B.."""
    clock = iter(range(100))
    one, other = [], []
    for number in range(12):
        for turn in (one, other) if number % 2 == 0 else (other, one):
            turn.append([1.01 ** next(clock)] * 3)
    ratio, _ = compare_turns(one, other, precision=0.01)
    assert ratio.value == pytest.approx(1, abs=1e-9)


def test_one_turn_that_somebody_disturbed_does_not_move_the_ratio() -> None:
    one, other = turns(2, seed=1, count=24), turns(2, seed=2, count=24)
    calm, _ = compare_turns(one, other, precision=0.01)
    one[5] = [3 * time_ms for time_ms in one[5]]
    ratio, found = compare_turns(one, other, precision=0.01)
    assert ratio.value == pytest.approx(calm.value, rel=0.002)
    assert found == "same"


def test_slow_steps_of_most_turns_count() -> None:
    """A step in ten takes ten times as long: 1.9 times the mean, and the median is the same."""
    one, other = turns(2, seed=1, steps=10, count=16), turns(2, seed=2, steps=10, count=16)
    assert not slow_steps_count(one, other)
    for turn in one:
        turn[3] *= 10
    ratio, found = compare_turns(one, other, precision=0.01)
    assert slow_steps_count(one, other)
    assert slow_steps_count(other, one)
    assert ratio.value == pytest.approx(1.9, rel=0.02)
    assert found == "slower"


def test_slow_steps_of_both_leave_the_typical_ones_to_tell() -> None:
    one, other = turns(2, seed=1, steps=10, count=16), turns(2, seed=2, steps=10, count=16)
    for turn in (*one, *other):
        turn[3] *= 10
    assert not slow_steps_count(one, other)
    assert compare_turns(one, other, precision=0.01)[1] == "same"


def test_fewer_turns_of_one_are_paired_with_the_first_of_the_other() -> None:
    one, other = turns(3, seed=1), turns(2, seed=2)
    assert compare_turns(one, other[:8], precision=0.01) == compare_turns(
        one[:8], other[:8], precision=0.01
    )


def test_three_pairs_are_too_few() -> None:
    few = turns(2, seed=1, count=3)
    with pytest.raises(ValueError, match="3 pairs of turns; a comparison takes 4"):
        compare_turns(few, few, precision=0.01)
    with pytest.raises(ValueError, match="3 turns"):
        compare_apart(few, few)
    assert step_interval(few, median=2.0) is None


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (0.995, 1.0, 1.005, "same"),
        (0.9902, 1.0, 1.0099, "same"),
        (0.985, 1.0, 1.005, "unclear"),
        (1.001, 1.005, 1.009, "same"),  # different, by less than counts
        (1.004, 1.009, 1.014, "unclear"),  # different, by about what counts
        (1.012, 1.02, 1.03, "slower"),
        (0.999, 1.02, 1.04, "unclear"),
        (0.96, 0.97, 0.98, "faster"),
        (0.3, 0.33, 0.9, "faster"),
    ],
)
def test_a_verdict_takes_the_whole_interval(
    *, low: float, value: float, high: float, verdict: str
) -> None:
    assert verdict_of(Estimate(value=value, low=low, high=high), precision=0.01) == verdict


@pytest.mark.parametrize(
    ("value", "half", "enough"),
    [(1.0, 0.0049, True), (1.0, 0.006, False), (1.02, 0.006, False), (3.0, 0.009, True)],
)
def test_it_is_enough_when_the_interval_is_narrow(value: float, half: float, enough: bool) -> None:
    ratio = Estimate(value=value, low=value * (1 - half), high=value * (1 + half))
    assert is_enough(ratio, precision=0.01) is enough


def test_runs_of_their_own_are_compared_by_what_moved_within_each() -> None:
    one, other = turns(3, seed=1, count=9), turns(2, seed=2, count=20)
    calm = compare_apart(one, other)
    assert calm.low < 1.5 < calm.high
    stormy = compare_apart(
        [[t * 1.05 ** (i % 5) for t in turn] for i, turn in enumerate(one)], other
    )
    assert math.log(stormy.high / stormy.low) > 5 * math.log(calm.high / calm.low)


def test_a_rate_counts_slow_steps_too() -> None:
    times = [[1.0, 2.0], [3.0, 10.0], [1.0, 1.0], [1.0, 1.0]]
    units = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
    found = rate(times, units)
    assert found.value == pytest.approx(360 / 20 * 1000)
    assert found.low < found.value < found.high
    assert rate(times, 5).value == pytest.approx(8 * 5 / 20 * 1000)


def test_a_rate_of_equal_steps_has_no_width() -> None:
    found = rate([[2.0, 2.0]], 1)
    assert (found.low, found.value, found.high) == pytest.approx((500, 500, 500))


@pytest.mark.parametrize("times", [[[10.0, 20.0]], [[10.0], [20.0]], [[10.0, 20.0, 15.0]]])
def test_few_steps_have_a_wide_interval(times: Turns) -> None:
    found = rate(times, 1.0)
    assert found.low < 1e3 / 20
    assert found.high > 1e3 / 10


@pytest.mark.parametrize(("times", "units"), [([[1.0]], 1), ([[1.0, 2.0]], [1.0])])
def test_a_rate_takes_two_steps_and_units_for_each(times: Turns, units: list[float]) -> None:
    with pytest.raises(ValueError, match="steps and units"):
        rate(times, units)


def test_a_spread_is_the_standard_librarys() -> None:
    times = turns(5, seed=3, count=1, steps=31)[0]
    deciles = quantiles(times, n=10, method="inclusive")
    found = spread(times)
    assert (found.p10, found.median, found.p90) == pytest.approx(
        (deciles[0], deciles[4], deciles[8])
    )
    assert (found.max, found.count) == (max(times), 31)
    assert spread([7.0]).median == 7.0


def test_an_exponent_is_found_and_its_interval_holds_it() -> None:
    source = random.Random(4)
    values = [8192, 16384, 24576, 32768, 49152]
    times = [3e-4 * value**1.3 * math.exp(source.gauss(0, 0.01)) for value in values]
    found = fit_exponent(values, times)
    assert found.low < 1.3 < found.high
    assert found.value == pytest.approx(1.3, abs=0.03)
    exact = fit_exponent(values, [2 * value**2 for value in values])
    assert (exact.low, exact.high) == pytest.approx((2, 2))


def test_a_curve_that_is_no_power_law_has_a_wide_interval() -> None:
    bent = fit_exponent([1, 2, 4, 8], [100, 101, 110, 300])
    assert bent.high - bent.low > 1


def test_two_values_fit_any_exponent() -> None:
    with pytest.raises(ValueError, match="three or more different values"):
        fit_exponent([1, 2, 2], [1, 2, 2])


def test_the_median_step_has_the_turns_interval() -> None:
    times = turns(5, seed=3)
    found = step_interval(times, median=5.0)
    assert found is not None
    assert found.low < found.value == 5.0 < found.high
    assert math.log(found.high / found.low) < 0.01


def test_an_interval_as_wide_as_no_float_is_still_one_that_can_be_divided_by() -> None:
    wild = [[1e-15], [1e-15], [1e15], [1e15]]
    found = compare_apart(wild, [[1.0]] * 4)
    assert 0 < found.low <= found.value <= found.high < math.inf
