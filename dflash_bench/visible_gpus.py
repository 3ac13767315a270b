"""Which GPU is CUDA's "cuda:N", by NVML's UUID; this process does not initialise CUDA to find out.

CUDA counts the GPUs that ``CUDA_VISIBLE_DEVICES`` names, the fastest first unless
``CUDA_DEVICE_ORDER`` is PCI_BUS_ID. NVML counts all of them, in the order of their bus.
"""

import os
import subprocess
import sys
from functools import cache
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
ASK_S = 60.0
ASK = (
    "import torch\n"
    "for number in range(torch.cuda.device_count()):\n"
    "    print(torch.cuda.get_device_properties(number).uuid)\n"
)


class UnknownGpuError(Exception):
    """A "cuda:N" of which nobody says which GPU it is."""


def uuid_of(nvml: Any, device: str) -> str:  # noqa: ANN401 - the untyped module pynvml
    """NVML's UUID of *device*, "cuda:N".

    Raises:
        UnknownGpuError: it cannot be told.
        nvml.NVMLError: NVML does not answer.
    """
    number = int(device.partition(":")[2] or 0)
    name = _visible_name(device, number)
    if name.startswith("MIG-"):
        return name
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids: list[str] = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    if name.startswith("GPU-"):
        found = [uuid for uuid in uuids if uuid.startswith(name)]
    elif len({nvml.nvmlDeviceGetName(handle) for handle in handles}) <= 1 or _is_by_bus():
        found = uuids[int(name) :][:1]
    else:
        found = [*as_cuda_counts(os.environ.get(VISIBLE))[number:][:1]]
    if len(found) != 1 or found[0] not in uuids:
        raise UnknownGpuError(
            f"which GPU {device} is cannot be told; {ORDER}=PCI_BUS_ID and the index that"
            f" nvidia-smi shows in {VISIBLE} make it known"
        )
    _require_whole(nvml, handles[uuids.index(found[0])], device)
    return found[0]


def _visible_name(device: str, number: int) -> str:
    """What the environment calls it: an index, or the beginning of a UUID."""
    visible = os.environ.get(VISIBLE)
    names = [str(number)] if visible is None else visible.split(",")[number:][:1]
    name = names[0].strip() if names else ""
    if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
        raise UnknownGpuError(f"which GPU {device} is cannot be told from {VISIBLE}={visible}")
    return name


def _is_by_bus() -> bool:
    return os.environ.get(ORDER) == "PCI_BUS_ID"


@cache
def as_cuda_counts(_visible: str | None) -> tuple[str, ...]:
    """UUIDs in CUDA's order, by a process that may initialise it; () where it does not say."""
    try:
        told = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=ASK_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(f"GPU-{uuid.removeprefix('GPU-')}" for uuid in told.stdout.split())


def _require_whole(nvml: Any, handle: Any, device: str) -> None:  # noqa: ANN401 - untyped pynvml
    """Refuse a GPU that is divided: CUDA opens a part of it, and NVML speaks of the whole."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError:
        return  # a model that cannot be divided
    if divided:
        raise UnknownGpuError(f"{device} is a part of a GPU; {VISIBLE}=MIG-... says which")
