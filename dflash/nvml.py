"""What the NVIDIA management library knows about the GPUs, without a CUDA context."""

from typing import Any

from pydantic import BaseModel, ConfigDict

NEAREST = {0: "same board", 10: "one switch", 20: "switches", 30: "host bridge", 40: "NUMA node"}
FAR = "across NUMA nodes"
P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
P2P_OK = 0  # NVML_P2P_STATUS_OK


class Gpu(BaseModel):
    """One GPU as the driver sees it; the index is NVML's, which CUDA_VISIBLE_DEVICES ignores."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    memory_gib: float
    used_gib: float
    compute_capability: str


class GpuReport(BaseModel):
    """All GPUs; ``links[i][j]`` is what joins two of them. Without NVML: why it is not known."""

    model_config = ConfigDict(frozen=True)

    driver: str | None = None
    gpus: list[Gpu] = []
    links: list[list[str]] = []
    unknown_because: str = ""


def gpu_report() -> GpuReport:
    """Ask NVML; a machine without it gives an empty report that says why."""
    try:
        import pynvml
    except ImportError:
        return GpuReport(unknown_because="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport(unknown_because=f"no NVIDIA driver answers ({error})")
    try:
        return _ask(pynvml)
    except pynvml.NVMLError as error:
        return GpuReport(unknown_because=f"NVML stopped answering ({error})")
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any) -> GpuReport:  # noqa: ANN401 - the untyped module pynvml
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    gpus = [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
    links = [[_link(nvml, one, other) for other in handles] for one in handles]
    return GpuReport(
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        gpus=gpus,
        links=links if len(handles) > 1 else [],
    )


def _gpu(nvml: Any, index: int, handle: object) -> Gpu:  # noqa: ANN401 - the untyped module pynvml
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_gib=round(memory.total / 2**30, 1),
        used_gib=round(memory.used / 2**30, 1),
        compute_capability=f"{major}.{minor}",
    )


def _link(nvml: Any, one: object, other: object) -> str:  # noqa: ANN401 - the untyped module pynvml
    """How two GPUs are joined; a question that a driver does not answer is "unknown"."""
    if one is other:
        return "self"
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, P2P_NVLINK) == P2P_OK:
            return "NVLink"
        return NEAREST.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), FAR)
    except nvml.NVMLError:
        return "unknown"


def _text(value: str | bytes) -> str:
    """Older versions of the binding answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
