"""The advice follows from who waited, and never sends the reader after a consequence."""

import pytest

from dflash.pipeline.waiting import Waits

ONE, OTHER = ["cuda:0"], ["cuda:1"]


@pytest.mark.parametrize(
    ("waited", "says"),
    [
        ((4.0, 4.0, 4.0), "balanced: no side waited more than 5%"),
        ((30.0, 2.0, 1.0), "targets waited 30% of the time for a free slot: the drafter is the"),
        ((2.0, 40.0, 1.0), "drafters waited 40% of the time for features: the target is the"),
        ((0.0, 60.0, 50.0), "targets waited 50% of the time for data"),
    ],
)
def test_the_cause_is_named_with_its_share(waited: tuple[float, ...], says: str) -> None:
    assert Waits(100.0, *waited).suggestion(ONE, OTHER).startswith(says)


def test_the_number_of_devices_is_said() -> None:
    waits = Waits(100.0, 0.0, 40.0, 0.0)
    assert "more devices (now 3)" in waits.suggestion(["cuda:0", "cuda:1", "cuda:2"], ["cuda:3"])


def test_sides_that_share_a_device_are_told_that_they_take_turns() -> None:
    text = Waits(100.0, 40.0, 3.0, 0.0).suggestion(["cuda:0", "cuda:1"], ["cuda:1"])
    assert text.startswith("target and drafter share cuda:1")


def test_a_run_without_time_has_no_advice() -> None:
    assert "nothing ran" in Waits(0.0, 0.0, 0.0, 0.0).suggestion(ONE, ONE)
