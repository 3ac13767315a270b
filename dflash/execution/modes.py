"""The execution modes this version has, and which one ``auto`` takes."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dflash.errors import ConfigError

Mode = Literal["eager", "compiled"]


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode a run uses and, in one sentence, why."""

    mode: Mode
    why: str


def choose_mode(
    requested: Literal["auto", "eager", "compiled"], devices: Sequence[str]
) -> ModeChoice:
    """Settle the execution mode for drafters on *devices*.

    ``auto`` takes ``compiled`` when every drafter is on a CUDA device and ``eager`` otherwise: on
    a CPU a small drafter's step is bound by its matrix products, so compiling buys little and
    costs tens of seconds.

    Raises:
        ConfigError: ``compiled`` on a CPU without a C++ compiler.
    """
    on_cpu = any(device.startswith("cpu") for device in devices)
    if requested == "auto":
        if on_cpu:
            return ModeChoice("eager", "a drafter runs on the CPU, where compiling gains little")
        return ModeChoice("compiled", "every drafter runs on a CUDA device")
    if requested == "compiled" and on_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "execution.mode = 'compiled' needs a C++ compiler for a drafter on the CPU, and neither"
            " g++ nor clang++ is on the PATH",
            hint="install one, or set execution.mode = 'eager'",
        )
    return ModeChoice(requested, "asked for by execution.mode")
