"""A stand-in for pynvml: an L4 and an H200, and functions that a driver lacks."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

GIB = 2**30


class NVMLError(Exception):
    """What the binding raises."""


@dataclass
class FakeNvml:
    """GPUs in NVML's order; *processes* run on the last, *lacks* answer "Not Supported"."""

    NVMLError: ClassVar = NVMLError
    names: tuple[str, ...] = ("NVIDIA L4", "NVIDIA H200")
    uuids: tuple[str, ...] = ("GPU-aaaa1111-22", "GPU-8932f937-33")
    clocks: tuple[int, ...] = (345, 1980)
    processes: dict[int, int] = field(default_factory=lambda: {7: 3 * GIB})
    lacks: tuple[str, ...] = ()
    divided: bool = False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's own name
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - NVML's own name
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802 - NVML's own name
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return self.uuids.index(uuid)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any function or constant of NVML
        if name.startswith("NVML_"):
            return 0
        answers = {
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "575.1",
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetP2PStatus": lambda *_: 0,
            "nvmlDeviceGetUUID": lambda gpu: self.uuids[gpu],
            "nvmlDeviceGetName": lambda gpu: self.names[gpu],
            "nvmlDeviceGetMigMode": lambda _: [int(self.divided), 0],
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
                total=80 * GIB, used=GIB, free=(20 + gpu) * GIB
            ),
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=0),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=used)
                for pid, used in self.processes.items()
                if gpu == len(self.names) - 1
            ],
            "nvmlDeviceGetClockInfo": lambda gpu, _: self.clocks[gpu],
            "nvmlDeviceGetPowerUsage": lambda _: 500_000,
            "nvmlDeviceGetTemperature": lambda *_: 60,
            "nvmlDeviceGetTemperatureThreshold": lambda *_: 87,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x04,
        }

        def answer(*asked: object) -> Any:  # noqa: ANN401 - as NVML's
            if name in self.lacks:
                raise NVMLError("Not Supported")
            return answers[name](*asked)

        return answer
