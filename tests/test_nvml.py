"""GPUs are described from what NVML answers, and their absence is explained."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.environment import environment
from dflash.nvml import gpu_report


class NVMLError(Exception):
    """What the binding raises."""


class FakeNvml:
    """Four GPUs: 0 and 1 joined by NVLink, 2 near both, 3 silent about its links."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's own name
        self.open -= 1

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any function of NVML
        answers = {
            "nvmlDeviceGetCount": lambda: 4,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlSystemGetDriverVersion": lambda: b"575.1",
            "nvmlDeviceGetName": lambda handle: f"GPU of {handle}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * 2**30, used=2**30),
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetP2PStatus": self._p2p,
            "nvmlDeviceGetTopologyCommonAncestor": lambda *_: 20,
        }
        return answers[name]

    def _p2p(self, one: str, other: str, _index: int) -> int:
        if "handle 3" in (one, other):
            raise NVMLError
        return 0 if {one, other} == {"handle 0", "handle 1"} else 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpus_and_their_links_are_described(nvml: FakeNvml) -> None:
    found = gpu_report()
    assert (found.driver, found.unknown_because, nvml.open) == ("575.1", "", 0)
    assert [gpu.name for gpu in found.gpus] == [f"GPU of handle {i}" for i in range(4)]
    assert found.gpus[1].model_dump() == {
        "index": 1,
        "name": "GPU of handle 1",
        "memory_gib": 80.0,
        "used_gib": 1.0,
        "compute_capability": "9.0",
    }
    assert found.links == [
        ["self", "NVLink", "switches", "unknown"],
        ["NVLink", "self", "switches", "unknown"],
        ["switches", "switches", "self", "unknown"],
        ["unknown", "unknown", "unknown", "self"],
    ]


def test_a_machine_without_a_driver_says_so(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    found = gpu_report()
    assert found.gpus == []
    assert found.unknown_because == "no NVIDIA driver answers (Driver Not Loaded)"


def test_a_machine_without_the_binding_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_report().unknown_because == "the package nvidia-ml-py is not installed"


def test_the_environment_explains_what_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = environment()
    assert found.packages["torch"] is not None
    for feature in found.features:
        assert feature.available == (feature.why == ""), feature.name
