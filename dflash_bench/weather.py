"""What NVML sees of the GPUs while steps are timed."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from dflash.measurement import Spoiled, Weather
from dflash_bench import host_memory
from dflash_bench.samples import GIB, POWER_CAP, Sample, judge, known, share_with
from dflash_bench.visible_gpus import UnknownGpuError, uuid_of

EVERY_S = 0.25
BUSY = 0.1
"""Use of a GPU before anything of ours runs, and load of a CPU for each core, that is told."""


class Watch:
    """Reads NVML in a thread of its own while ``watching``; no CUDA context is made.

    Without NVML or a GPU it reads nothing, and of a driver what that answers; ``weather`` says
    what is missing and why.

    Args:
        devices: to watch; ``look_at`` chooses among them.
        uuids: of the GPUs, where whoever started this process has found them out.
    """

    def __init__(self, devices: Sequence[str], *, uuids: Mapping[str, str] | None = None) -> None:
        self.samples: list[Sample] = []
        self.peaks: dict[int, int] = {}
        self.uuids: dict[str, str] = {}
        self.slowdown_c: dict[str, float] = {}
        self._unknown_because = ""
        self._silent: dict[str, str] = {}
        self._before = ""
        self._busy = 0.0
        self._on = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="weather", daemon=True)
        self._handles: dict[str, Any] = {}
        self._looked_at: list[str] = []
        self._nvml: Any = None
        gpus = [name for name in devices if name.startswith("cuda")]
        if not gpus:
            self._unknown_because = "steps run on a CPU, of whose clocks nothing is known"
            self._look_at_cpu()
        else:
            self._open(gpus, uuids)

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

    def look_at(self, devices: Collection[str]) -> None:
        """From now on read these devices only: another one is idle, or somebody else's."""
        self._looked_at = [name for name in self._handles if name in devices]

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
        found = self._ask("free memory", self._nvml.nvmlDeviceGetMemoryInfo, device)
        return None if found is None else float(found.free) / GIB

    def gpu_name(self, device: str) -> str | None:
        """Of a GPU that is watched; None where nobody says."""
        if device not in self._handles:
            return None
        name: str | None = self._ask("names", self._nvml.nvmlDeviceGetName, device)
        return name

    def process_gib(self, number: int | None) -> float | None:
        """Highest memory of a process on the GPUs, by its number as NVML counts."""
        found = self.peaks.get(number) if number is not None else None
        return None if found is None else found / GIB

    def processes(self) -> dict[int, int]:
        """Bytes by process on all GPUs that are looked at; {} where one of them does not tell."""
        found: dict[int, int] = {}
        for name in self._looked_at:
            running = self._ask("processes", self._nvml.nvmlDeviceGetComputeRunningProcesses, name)
            if running is None:
                return {}
            for one in running:
                found[one.pid] = found.get(one.pid, 0) + (one.usedGpuMemory or 0)
        return found

    def weather(self, own: Collection[int]) -> Weather:
        """What there was; *own* are the processes of this bench, as NVML counts them."""
        samples = self.samples
        spoiled = judge(samples, own=own, slowdown_c=self.slowdown_c)
        if self._before:
            told = Spoiled(what="other processes", text=self._before, share=min(1.0, self._busy))
            spoiled = [told, *spoiled]
        clocks = known(sample.sm_mhz for sample in samples)
        watts = known(sample.power_w for sample in samples)
        return Weather(
            samples=len(samples),
            sm_mhz_median=statistics.median(clocks) if clocks else None,
            sm_mhz_low=min(clocks, default=None),
            sm_mhz_high=max(clocks, default=None),
            power_w_median=statistics.median(watts) if watts else None,
            power_limited_share=share_with(POWER_CAP, samples),
            temperature_c_max=max(known(s.temperature_c for s in samples), default=None),
            spoiled=spoiled,
            unknown_because=self._why_unknown(),
        )

    def _why_unknown(self) -> str:
        silent = ", ".join(f"{what} ({why})" for what, why in self._silent.items())
        told = [self._unknown_because, f"NVML did not tell {silent}" if silent else ""]
        return "; ".join(filter(None, told))

    def _ask(self, what: str, question: Callable[..., Any], device: str, *more: object) -> Any:  # noqa: ANN401 - whatever NVML answers
        """NVML's answer about a GPU; None where it has none, which is told as *what*."""
        try:
            return question(self._handles[device], *more)
        except self._nvml.NVMLError as error:
            self._silent[what] = str(error)
            return None

    def _open(self, gpus: Sequence[str], uuids: Mapping[str, str] | None) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self.uuids = (
                {name: uuid_of(pynvml, name) for name in gpus} if uuids is None else dict(uuids)
            )
            self._handles = {
                name: pynvml.nvmlDeviceGetHandleByUUID(uuid) for name, uuid in self.uuids.items()
            }
            self.look_at(gpus)
            self.slowdown_c = self._slowdown_c()
        except UnknownGpuError as error:
            self._unknown_because = str(error)
        except Exception as error:  # noqa: BLE001 - whatever NVML lacks, a bench goes on
            self._unknown_because = f"NVML does not answer: {error}"

    def _slowdown_c(self) -> dict[str, float]:
        """By device; no figure rests on it, so that nothing is told where a driver does not."""
        kind = self._nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        found = {}
        for name, handle in self._handles.items():
            with suppress(self._nvml.NVMLError):
                found[name] = float(self._nvml.nvmlDeviceGetTemperatureThreshold(handle, kind))
        return found

    def _look_before(self) -> None:
        """Whether somebody else uses the GPUs before anything of ours does."""
        question = self._nvml.nvmlDeviceGetUtilizationRates
        rates = [self._ask("use beforehand", question, name) for name in self._handles]
        self._busy = max((rate.gpu / 100 for rate in rates if rate is not None), default=0.0)
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
                self._unknown_because = f"NVML stopped answering: {error}"
                return
            time.sleep(EVERY_S)

    def _read(self) -> None:
        everyone = self.processes()
        for number, used in everyone.items():
            if used:  # some drivers know the process and not its memory
                self.peaks[number] = max(used, self.peaks.get(number, 0))
        self.samples += [self._sample(name, everyone) for name in self._looked_at]

    def _sample(self, device: str, everyone: dict[int, int]) -> Sample:
        nvml, ask = self._nvml, self._ask
        milliwatts = ask("power", nvml.nvmlDeviceGetPowerUsage, device)
        degrees = nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU
        return Sample(
            device=device,
            sm_mhz=ask("clocks", nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_SM),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=ask("temperature", *degrees),
            reasons=ask("slowdowns", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, device),
            processes=everyone,
        )
