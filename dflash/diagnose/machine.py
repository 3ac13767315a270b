"""What there is to run on, and what of a failure mode that allows. Makes no CUDA context."""

import os
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from dflash.diagnose.findings import Part
from dflash.environment import Environment, environment
from dflash.errors import MissingError
from dflash.failures import FailureMode

OLDEST = (2, 9)
GPUS_NEEDED = {"cpu": 0, "gpu": 1, "two gpus": 2}


@dataclass(frozen=True, slots=True)
class Machine:
    """The installed torch, the GPUs that it may use, the processor cores."""

    torch: str
    num_gpus: int
    num_cores: int
    environment: Environment


class Applies(NamedTuple):
    """What to run of a mode, if anything, and what cannot be run here."""

    part: Part | None
    not_run: str


def look() -> Machine:
    """Ask package metadata, NVML and the operating system.

    Raises:
        MissingError: torch is absent or older than what the modes are written for.
    """
    version = installed_torch()
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() then starts no driver
    try:
        import torch

        found = environment()
        num_gpus = torch.cuda.device_count() if torch.version.cuda else 0
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before
    return Machine(version, num_gpus, found.cpu_cores, found)


def installed_torch() -> str:
    """The version of torch, with its local part, without importing it.

    Raises:
        MissingError: torch is absent or too old.
    """
    hint = "pip install 'torch>=2.9'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise MissingError("torch is not installed", hint=hint) from error
    numbers = version.partition("+")[0].split(".")
    if tuple(int(number) for number in numbers[:2]) < OLDEST:
        what = f"torch {version} is too old: the failure modes need 2.9 or newer"
        raise MissingError(what, hint=hint)
    return version


def applies(mode: FailureMode, machine: Machine) -> Applies:
    """What of *mode* this machine can run."""
    needed = GPUS_NEEDED[mode.device]
    if machine.num_gpus >= needed:
        return Applies("whole", "")
    wanted = "a CUDA GPU" if needed == 1 else f"{needed} CUDA GPUs"
    has = machine.num_gpus or "none"
    if mode.part_on_cpu is None:
        return Applies(None, f"needs {wanted}, here is {has}")
    return Applies("cpu", f"only its part on the CPU: the rest needs {wanted}, here is {has}")
