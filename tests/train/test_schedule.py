"""The learning rate rises in equal steps, then falls along half a cosine."""

import math

import pytest

from dflash.train.schedule import Cosine


def by_loop(peak: float, floor: float, *, warmup_steps: int, num_steps: int) -> list[float]:
    """The recipe, one step after another."""
    rates = [peak * (step + 1) / warmup_steps for step in range(warmup_steps)]
    for done in range(num_steps - warmup_steps):
        angle = math.pi * done / (num_steps - warmup_steps)
        rates.append(floor + (peak - floor) * (1 + math.cos(angle)) / 2)
    return rates


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 25])
@pytest.mark.parametrize("floor", [0.0, 1e-4])
def test_it_is_the_recipe_of_the_loop(warmup_steps: int, floor: float) -> None:
    schedule = Cosine(peak=6e-4, floor=floor, warmup_steps=warmup_steps, num_steps=100)
    expected = by_loop(6e-4, floor, warmup_steps=warmup_steps, num_steps=100)
    assert [schedule.at(step) for step in range(100)] == pytest.approx(expected, rel=1e-12)


def test_the_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    schedule = Cosine(peak=1.0, floor=0.0, warmup_steps=4, num_steps=20)
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_past_the_end_it_stays_at_the_floor() -> None:
    schedule = Cosine(peak=1.0, floor=0.1, warmup_steps=0, num_steps=10)
    assert schedule.at(10) == schedule.at(99) == pytest.approx(0.1)


def test_a_run_that_is_all_warm_up_divides_by_nothing() -> None:
    assert Cosine(peak=1.0, floor=0.0, warmup_steps=3, num_steps=3).at(3) == 1.0
