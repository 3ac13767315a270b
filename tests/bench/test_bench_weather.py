"""What NVML saw is told where it spoils a run, with its figures, and only there."""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_nvml import FakeNvml
from bench_subjects import Sound

from dflash_bench.own_process import Numbered
from dflash_bench.samples import Sample, judge
from dflash_bench.weather import Watch

FINE = Sample(
    device="cuda:0",
    sm_mhz=1500,
    power_w=500,
    temperature_c=60,
    reasons=0,
    processes={7: 2**30},
)
GPUS = ("cuda:0", "cuda:1")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two H200, one of which idles."""
    fake = FakeNvml(names=("NVIDIA H200", "NVIDIA H200"))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr("dflash_bench.weather.EVERY_S", 0.001)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def watched(*devices: str) -> Watch:
    """One that has looked at *devices* of two GPUs."""
    with Watch(GPUS) as watch:
        watch.look_at(devices)
        with watch.watching():
            ends_at = time.monotonic() + 10
            while len(watch.samples) < 10 and time.monotonic() < ends_at:
                time.sleep(0.001)
    return watch


def spoiled(samples: list[Sample], *, own: tuple[int, ...] = (7,)) -> dict[str, float]:
    return {one.what: one.share for one in judge(samples, own=own, slowdown_c={"cuda:0": 87})}


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
    told = judge([FINE, FINE, FINE, shared], own=(7,), slowdown_c={})
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


@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_nobody_measures_is_not_sampled() -> None:
    found = watched("cuda:1").weather({7})
    assert (found.sm_mhz_low, found.sm_mhz_high) == (1980, 1980)
    assert found.spoiled == []


@pytest.mark.usefixtures("nvml")
def test_clocks_are_held_against_those_of_the_same_gpu() -> None:
    watch = watched(*GPUS)
    found = watch.weather({7})
    assert {sample.device for sample in watch.samples} == set(GPUS)
    assert (found.sm_mhz_low, found.sm_mhz_high) == (345, 1980)
    assert found.spoiled == []


def test_what_one_of_several_gpus_does_is_told_with_its_name_and_share() -> None:
    samples = [replace(FINE, device=device) for device in GPUS for _ in range(10)]
    samples[:2] = [replace(FINE, sm_mhz=1000)] * 2
    samples[10:12] = [replace(samples[10], reasons=0x40, temperature_c=86)] * 2
    told = judge(samples, own=(7,), slowdown_c={"cuda:0": 95, "cuda:1": 87})
    assert [(one.what, one.text[:6], one.share) for one in told] == [
        ("clocks", "cuda:0", 0.2),
        ("throttled", "cuda:1", 0.2),
        ("temperature", "cuda:1", 0.2),
    ]


@pytest.mark.parametrize(
    ("lacking", "told", "figure"),
    [
        ("nvmlDeviceGetClockInfo", "clocks", "sm_mhz_median"),
        ("nvmlDeviceGetPowerUsage", "power", "power_w_median"),
        ("nvmlDeviceGetTemperature", "temperature", "temperature_c_max"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "slowdowns", "power_limited_share"),
    ],
)
def test_a_reading_that_a_driver_lacks_is_null_and_the_others_are_there(
    nvml: FakeNvml, *, lacking: str, told: str, figure: str
) -> None:
    nvml.lacks = (lacking,)
    found = watched("cuda:1").weather({7})
    whole = {
        "sm_mhz_median": 1980,
        "power_w_median": 500,
        "temperature_c_max": 60,
        "power_limited_share": 1,
    }
    assert found.samples >= 10
    assert found.model_dump(include=set(whole)) == whole | {figure: None}
    assert found.unknown_because == f"NVML did not tell {told} (Not Supported)"


def test_a_driver_that_tells_nothing_ends_nothing(nvml: FakeNvml) -> None:
    nvml.lacks = tuple(
        f"nvmlDeviceGet{name}"
        for name in (
            "ClockInfo",
            "PowerUsage",
            "Temperature",
            "CurrentClocksThrottleReasons",
            "TemperatureThreshold",
            "UtilizationRates",
            "ComputeRunningProcesses",
            "MemoryInfo",
        )
    )
    watch = watched("cuda:0")
    assert watch.free_gib("cuda:0") is None
    assert (watch.processes(), watch.process_gib(7)) == ({}, None)
    found = watch.weather({7})
    assert found.spoiled == []
    figures = {"sm_mhz_low", "power_w_median", "temperature_c_max", "power_limited_share"}
    assert set(found.model_dump(include=figures).values()) == {None}
    told = found.unknown_because.count("(Not Supported)")
    assert told == len(nvml.lacks) - 1  # no figure rests on the temperature of slowing down


def test_memory_is_counted_where_processes_are_told(nvml: FakeNvml) -> None:
    watch = watched("cuda:1")
    assert (watch.free_gib("cuda:0"), watch.free_gib("cuda:1")) == (20.0, 21.0)
    assert watch.process_gib(7) == 3.0
    assert watch.weather({7}).unknown_because == ""
    nvml.lacks = ("nvmlDeviceGetComputeRunningProcesses",)
    watch = watched("cuda:1")
    assert watch.process_gib(7) is None
    found = watch.weather({7})
    assert found.sm_mhz_median == 1980
    assert found.unknown_because == "NVML did not tell processes (Not Supported)"


def test_memory_of_a_process_is_not_told_where_one_of_its_gpus_does_not_tell(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_second(gpu: int) -> list[SimpleNamespace]:
        if gpu == 0:
            raise nvml.NVMLError("Not Supported")
        return [SimpleNamespace(pid=7, usedGpuMemory=2**30)]

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", of_the_second)
    assert watched("cuda:1").process_gib(7) == 1.0
    assert watched(*GPUS).process_gib(7) is None


@pytest.mark.parametrize(("lacks", "held_gib"), [((), 3.0), (("ComputeRunningProcesses",), None)])
def test_a_subject_is_built_whether_or_not_its_process_is_found(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    lacks: tuple[str, ...],
    held_gib: float | None,
) -> None:
    def open_gpu(*_: object, **_more: object) -> None:
        nvml.processes[1234] = 3 * 2**30

    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch, "zeros", open_gpu)
    nvml.lacks = tuple(f"nvmlDeviceGet{name}" for name in lacks)
    make = partial(Sound, "one", tmp_path / "log")
    numbered = Numbered(make, devices=("cuda:1",), uuids=Watch(("cuda:1",)).uuids)()
    number = None if lacks else 1234
    assert numbered.build() == {"gpu_process": number, "process": os.getpid()}
    assert numbered.so_far() == {"gpu_process": number, "process_gib": held_gib}
