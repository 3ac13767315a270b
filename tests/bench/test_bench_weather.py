"""What NVML saw is told where it spoils a run, with its figures, and only there."""

import os
from dataclasses import replace

import pytest

from dflash_bench.weather import Sample, Watch, judge

FINE = Sample(sm_mhz=1500, power_w=500, temperature_c=60, reasons=0, processes={7: 2**30})


def spoiled(samples: list[Sample], *, own: tuple[int, ...] = (7,)) -> dict[str, float]:
    return {one.what: one.share for one in judge(samples, own=own, slowdown_c=87)}


def test_nothing_is_said_of_a_fine_day() -> None:
    assert spoiled([FINE] * 50) == {}
    assert spoiled([]) == {}


def test_a_slowdown_of_the_hardware_is_told_with_its_share() -> None:
    hot = replace(FINE, reasons=0x40)
    assert spoiled([FINE] * 9 + [hot]) == {"throttled": 0.1}
    assert spoiled([FINE] * 999 + [hot]) == {}


def test_the_power_limit_is_a_figure_and_spoils_nothing() -> None:
    watch = Watch(["cpu"])
    watch.samples = [FINE, replace(FINE, reasons=0x04)]
    found = watch.weather({7})
    assert found.power_limited_share == 0.5
    assert [one.what for one in found.spoiled if one.what != "other processes"] == []


def test_clocks_that_move_are_told() -> None:
    slow = replace(FINE, sm_mhz=1200)
    assert set(spoiled([FINE] * 5 + [slow] * 5)) == {"clocks"}
    assert spoiled([FINE, replace(FINE, sm_mhz=1510)] * 10) == {}


def test_a_gpu_near_its_limit_is_told() -> None:
    assert spoiled([FINE, replace(FINE, temperature_c=86)]) == {"temperature": 0.5}


def test_other_processes_are_told_where_ours_are_known_by_their_numbers() -> None:
    shared = replace(FINE, processes={7: 2**30, 8: 3 * 2**30})
    told = judge([FINE, FINE, FINE, shared], own=(7,), slowdown_c=None)
    assert [(one.what, one.share) for one in told] == [("other processes", 0.25)]
    assert "up to 3.0 GiB" in told[0].text
    # numbers of another namespace: all would be strangers
    assert spoiled([shared] * 4, own=(1234,)) == {}


def test_without_a_gpu_the_weather_says_why_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with Watch(["cpu"]) as watch, watch.watching():
        pass
    assert watch.free_gib("cuda:0") is None
    assert watch.process_gib(1) is None
    found = watch.weather(set())
    assert (found.samples, found.spoiled) == (0, [])
    assert "CPU" in found.unknown_because


def test_a_cpu_that_others_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    told = Watch(["cpu"]).weather(set()).spoiled
    assert [(one.what, one.share) for one in told] == [("other processes", 0.75)]
