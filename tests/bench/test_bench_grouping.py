"""Modes are alive together as far as memory goes, and none is lost."""

import pytest

from dflash_bench.grouping import CONTEXT_GIB, GAPS_GIB, ON_CPU, group_modes

BESIDE = CONTEXT_GIB + GAPS_GIB


def test_where_memory_is_not_counted_all_are_together() -> None:
    found = group_modes({"a": None, "b": None, "c": None}, None)
    assert (found.baseline, found.together) == ("a", [["b", "c"]])
    assert found.alone == found.too_large == []


def test_the_qwen3_8b_modes_take_two_groups_on_an_h200() -> None:
    needs = {"eager": 29.5, "compiled": 22.5, "reduce-overhead": 22.5, "warmed": 22.5}
    found = group_modes(needs | {"graphed": 22.5}, 137.5)
    assert found.baseline == "eager"
    assert found.together == [["compiled", "reduce-overhead", "warmed"], ["graphed"]]


def test_a_mode_that_fits_beside_nobody_is_alone_and_is_no_baseline() -> None:
    found = group_modes({"eager": 97.2, "compiled": 62.2, "graphed": 62.2}, 137.5)
    assert found.baseline == "compiled"
    assert found.together == [["graphed"]]
    assert found.alone == ["eager"]


def test_what_cannot_fit_is_told_and_what_is_tight_is_tried() -> None:
    found = group_modes({"eager": 176.8, "compiled": 108.3, "graphed": 145.0}, 137.5)
    assert found.too_large == ["eager"]
    assert (found.baseline, found.together) == ("", [])
    assert found.alone == ["compiled", "graphed"]


@pytest.mark.parametrize("room", [20.0, 45.0, 70.0, 100.0, 200.0])
def test_no_group_needs_more_than_there_is_and_no_mode_is_lost(room: float) -> None:
    needs = {"a": 10.0, "b": 31.0, "c": 8.0, "d": 90.0, "e": None, "f": 12.0}
    found = group_modes(needs, room)
    takes = {
        name: (room / 4 + CONTEXT_GIB if n is None else n + BESIDE) for name, n in needs.items()
    }
    for group in found.together:
        assert takes[found.baseline] + sum(takes[name] for name in group) <= room
    measured = [name for group in found.together for name in group]
    everyone = [found.baseline] * bool(found.baseline) + measured + found.alone + found.too_large
    assert sorted(everyone) == sorted(needs)


def test_small_modes_and_those_without_a_plan_are_together_on_a_busy_cpu() -> None:
    needs = {"eager": 0.02, "compiled": 0.01, "mask": None, "packing": None}
    found = group_modes(needs, 1.5, beyond=ON_CPU)
    assert (found.baseline, found.together) == ("eager", [["compiled", "mask", "packing"]])


def test_modes_that_fit_a_cpu_one_by_one_are_measured_one_by_one() -> None:
    found = group_modes({"eager": 12.0, "compiled": 11.0, "dense": 30.0}, 20.0, beyond=ON_CPU)
    assert (found.baseline, found.together, found.too_large) == ("", [], ["dense"])
    assert found.alone == ["eager", "compiled"]
