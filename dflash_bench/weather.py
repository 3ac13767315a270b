"""What NVML sees of the GPUs while steps are timed, and what of it makes a run less believable."""

import os
import statistics
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from dflash.measurement import Spoiled, Weather
from dflash_bench import host_memory

EVERY_S = 0.25
GIB = 2**30
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAP = 0x04
"""No slowdown: a GPU at full work runs at the clocks that its power limit allows."""

What = Literal["throttled", "clocks", "other processes", "temperature"]
FEW = 0.01
"""Share of the samples from which a slowdown is told."""

CLOCKS_MOVE = 0.05
NEAR_SLOWDOWN_C = 3
BUSY = 0.1
"""Use of a GPU before anything of ours runs, and load of a CPU for each core, that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of one GPU. ``processes`` are bytes by process number, as NVML counts them."""

    sm_mhz: float
    power_w: float
    temperature_c: float
    reasons: int
    processes: dict[int, int] = field(default_factory=dict)


class Watch:
    """Reads NVML in a thread of its own while ``watching``; no CUDA context is made.

    Without NVML or a GPU it reads nothing and ``weather`` says why.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.samples: list[Sample] = []
        self.peaks: dict[int, int] = {}
        self.unknown_because = ""
        self.hottest_c: float | None = None
        self._before = ""
        self._busy = 0.0
        self._on = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="weather", daemon=True)
        self._handles: dict[str, Any] = {}
        self._nvml: Any = None
        gpus = [name for name in devices if name.startswith("cuda")]
        if not gpus:
            self.unknown_because = "steps run on a CPU, of whose clocks nothing is known"
            self._look_at_cpu()
        else:
            self._open(gpus)

    def __enter__(self) -> Self:
        if self._handles:
            self._look_before()
            self._thread.start()
        return self

    def __exit__(self, *_how: object) -> None:
        self._ends.set()
        self._on.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take samples inside."""
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()

    def free_gib(self, device: str) -> float | None:
        """Free memory of the CPU's machine, or of a GPU that is watched; None where nobody says."""
        if device == "cpu":
            return host_memory.free_gib()
        if device not in self._handles:
            return None
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[device]).free) / GIB

    def process_gib(self, number: int | None) -> float | None:
        """Highest memory of a process on the GPUs, by its number as NVML counts."""
        found = self.peaks.get(number) if number is not None else None
        return None if found is None else found / GIB

    def processes(self) -> dict[int, int]:
        """Bytes by process on all GPUs that are watched."""
        found: dict[int, int] = {}
        for handle in self._handles.values():
            for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                found[one.pid] = found.get(one.pid, 0) + (one.usedGpuMemory or 0)
        return found

    def weather(self, own: Collection[int]) -> Weather:
        """What there was; *own* are the processes of this bench, as NVML counts them."""
        spoiled = judge(self.samples, own=own, slowdown_c=self.hottest_c)
        if self._before:
            told = Spoiled(what="other processes", text=self._before, share=min(1.0, self._busy))
            spoiled = [told, *spoiled]
        if not self.samples:
            return Weather(spoiled=spoiled, unknown_because=self.unknown_because)
        clocks = sorted(sample.sm_mhz for sample in self.samples)
        return Weather(
            samples=len(self.samples),
            sm_mhz_median=statistics.median(clocks),
            sm_mhz_low=clocks[0],
            sm_mhz_high=clocks[-1],
            power_w_median=statistics.median(sample.power_w for sample in self.samples),
            power_limited_share=share_with(POWER_CAP, self.samples),
            temperature_c_max=max(sample.temperature_c for sample in self.samples),
            spoiled=spoiled,
            unknown_because=self.unknown_because,
        )

    def _open(self, gpus: Sequence[str]) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = {name: _handle(pynvml, name) for name in gpus}
            self.hottest_c = _slowdown_c(pynvml, self._handles[gpus[0]])
        except Exception as error:  # noqa: BLE001 - whatever NVML lacks, a bench goes on
            self.unknown_because = f"NVML does not answer: {error}"

    def _look_before(self) -> None:
        """Whether somebody else uses the GPUs before anything of ours does."""
        try:
            rates = map(self._nvml.nvmlDeviceGetUtilizationRates, self._handles.values())
            self._busy = max(rate.gpu / 100 for rate in rates)
        except self._nvml.NVMLError:
            return
        if self._busy > BUSY:
            self._before = f"a GPU was {self._busy:.0%} busy before anything of this bench ran"

    def _look_at_cpu(self) -> None:
        if hasattr(os, "getloadavg"):
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
            self._busy = load / cores
            if self._busy > BUSY:
                self._before = (
                    f"{load:.1f} processes were waiting for or using {cores} cores in the minute"
                    " before anything of this bench ran"
                )

    def _read_on(self) -> None:
        while not self._ends.is_set():
            self._on.wait()
            if self._ends.is_set():
                return
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - a bench goes on without
                self.unknown_because = f"NVML stopped answering: {error}"
                return
            time.sleep(EVERY_S)

    def _read(self) -> None:
        nvml = self._nvml
        everyone = self.processes()
        for number, used in everyone.items():
            if used:  # some drivers know the process and not its memory
                self.peaks[number] = max(used, self.peaks.get(number, 0))
        for handle in self._handles.values():
            self.samples.append(
                Sample(
                    sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                    temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                    reasons=nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                    processes=everyone,
                )
            )


def judge(
    samples: Sequence[Sample], *, own: Collection[int], slowdown_c: float | None
) -> list[Spoiled]:
    """What of the samples makes figures less believable."""
    if not samples:
        return []
    found = [*_throttled(samples), *_clocks(samples), *_others(samples, own)]
    hottest = max(sample.temperature_c for sample in samples)
    if slowdown_c is not None and hottest > slowdown_c - NEAR_SLOWDOWN_C:
        near = [s for s in samples if s.temperature_c > slowdown_c - NEAR_SLOWDOWN_C]
        text = f"up to {hottest:.0f} degrees C, and a GPU slows down at {slowdown_c:.0f}"
        found.append(_spoiled("temperature", text, len(near) / len(samples)))
    return found


def share_with(reason: int, samples: Sequence[Sample]) -> float:
    """Share of *samples* in which this lowered clocks."""
    return sum(bool(sample.reasons & reason) for sample in samples) / len(samples)


def _spoiled(what: What, text: str, share: float) -> Spoiled:
    return Spoiled(what=what, text=f"{text}, in {share:.0%} of the samples", share=share)


def _throttled(samples: Sequence[Sample]) -> Iterator[Spoiled]:
    for bits, name in SLOWDOWNS.items():
        share = share_with(bits, samples)
        if share >= FEW:
            yield _spoiled("throttled", name, share)


def _clocks(samples: Sequence[Sample]) -> Iterator[Spoiled]:
    clocks = sorted(sample.sm_mhz for sample in samples)
    low, median, high = (clocks[int(part * (len(clocks) - 1))] for part in (0.1, 0.5, 0.9))
    if median and (high - low) / median > CLOCKS_MOVE:
        outside = [mhz for mhz in clocks if abs(mhz - median) > CLOCKS_MOVE / 2 * median]
        text = (
            f"10th to 90th percentile {low:,.0f} to {high:,.0f} MHz; more than"
            f" {CLOCKS_MOVE / 2:.1%} off the median"
        )
        yield _spoiled("clocks", text, len(outside) / len(clocks))


def _others(samples: Sequence[Sample], own: Collection[int]) -> Iterator[Spoiled]:
    """Processes that are not ours; where NVML counts in another way than we do, nothing is said."""
    if not any(number in own for sample in samples for number in sample.processes):
        return
    seen = [
        {number: used for number, used in sample.processes.items() if number not in own}
        for sample in samples
    ]
    strangers = {number for each in seen for number in each}
    if strangers:
        most = max(sum(each.values()) for each in seen) / GIB
        text = f"{len(strangers)} on the same GPUs, with up to {most:.1f} GiB"
        yield _spoiled("other processes", text, sum(bool(each) for each in seen) / len(seen))


def _slowdown_c(nvml: Any, handle: Any) -> float | None:  # noqa: ANN401 - the untyped pynvml
    kind = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    try:
        return float(nvml.nvmlDeviceGetTemperatureThreshold(handle, kind))
    except nvml.NVMLError:
        return None


def _handle(nvml: Any, device: str) -> Any:  # noqa: ANN401 - the untyped module pynvml
    """NVML's handle of CUDA's "cuda:N", which counts the visible ones only."""
    index = int(device.partition(":")[2] or 0)
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if any(visible) and index < len(visible) else str(index)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
