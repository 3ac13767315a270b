"""The execution modes, what each needs, and which one ``auto`` tries first."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dflash.errors import ConfigError
from dflash.execution.versions import behaviour_of, is_known

Mode = Literal["eager", "compiled", "reduce-overhead", "warmed", "graphed"]
CAPTURING: tuple[Mode, ...] = ("reduce-overhead", "warmed", "graphed")
SEALABLE: tuple[Mode, ...] = ("eager", "compiled", "warmed", "graphed")
"""All but the one that captures whenever it meets something new."""

AUTO_ON_CUDA: tuple[Mode, ...] = ("graphed", "compiled", "eager")
"""``warmed`` is not among them: where a part cannot be captured whole, torch's trees, whose state
is shared by all threads, are no safer bet than launching."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode a run uses and, in one sentence, why; ``fallbacks`` are tried if it fails."""

    mode: Mode
    why: str
    fallbacks: tuple[Mode, ...] = ()

    def fall_back(self, reason: str) -> "ModeChoice":
        """The next mode, and what kept the one before from being used."""
        tried = "was tried next" if "was tried first" in self.why else "was tried first"
        before = f"{self.why}; " if tried == "was tried next" else ""
        why = f"{before}{self.mode} {tried}: {reason}"
        return replace(self, mode=self.fallbacks[0], why=why, fallbacks=self.fallbacks[1:])


def choose_mode(
    requested: Literal["auto"] | Mode,
    devices: Sequence[str],
    *,
    accumulates: bool = False,
    allow_unsafe: bool = False,
    torch_version: str = torch.__version__,
) -> ModeChoice:
    """Settle the execution mode for workers on *devices*, one each.

    ``auto`` takes ``eager`` when a worker is on a CPU: a small drafter's step is bound by its
    matrix products there, so compiling buys little and costs tens of seconds. On CUDA devices it
    tries ``graphed``, and what its choice says then is what a trial has to confirm.

    Raises:
        ConfigError: a mode that these devices, or so many workers on this torch, cannot do.
    """
    on_cpu = any(device.startswith("cpu") for device in devices)
    if requested == "auto":
        if on_cpu:
            return ModeChoice("eager", "a drafter runs on the CPU, where compiling gains little")
        first, *others = AUTO_ON_CUDA
        return ModeChoice(first, "every drafter runs on a CUDA device", tuple(others))
    if on_cpu:
        _check_cpu(requested)
    if requested == "reduce-overhead" and not allow_unsafe:
        _check_lazy(len(devices), torch_version)
    if requested in ("warmed", "reduce-overhead"):
        _check_shared_trees(requested, devices, accumulates=accumulates)
    untried = requested in CAPTURING and not is_known(torch_version)
    doubt = f"; how torch {torch_version} captures in threads is not known" if untried else ""
    return ModeChoice(requested, f"asked for by execution.mode{doubt}")


def _check_cpu(mode: Mode) -> None:
    if mode in CAPTURING:
        raise ConfigError(
            f"execution.mode = {mode!r} captures CUDA graphs, but a drafter runs on the CPU",
            hint="set execution.mode = 'auto', or give drafter.devices a CUDA device",
        )
    if mode == "compiled" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "execution.mode = 'compiled' needs a C++ compiler for a drafter on the CPU, and neither"
            " g++ nor clang++ is on the PATH",
            hint="install one, or set execution.mode = 'eager'",
        )


def _check_lazy(num_workers: int, torch_version: str) -> None:
    if num_workers > 1 and not is_known(torch_version):
        raise ConfigError(
            f"execution.mode = 'reduce-overhead' with {num_workers} drafters: what torch"
            f" {torch_version} does with captures in several threads is not known"
            " (cudagraph-trees)",
            hint="set execution.mode = 'graphed', or execution.allow_unsafe = true to try it",
        )
    if behaviour_of(torch_version).lazy_workers_die(num_workers):
        raise ConfigError(
            f"execution.mode = 'reduce-overhead' with {num_workers} drafters on torch"
            f" {torch_version}: all drafter threads but one die at their first capture of a bare"
            " AssertionError, since torch's cudagraph trees belong to one thread"
            " (cudagraph-trees; fixed in torch 2.13)",
            hint="set execution.mode = 'graphed' (or 'warmed'), or execution.allow_unsafe = true"
            " to see it happen",
        )


def _check_shared_trees(mode: Mode, devices: Sequence[str], *, accumulates: bool) -> None:
    """Refuse what the step marks of one worker would break in another."""
    twice = sorted({device for device in devices if devices.count(device) > 1})
    if twice:
        raise ConfigError(
            f"execution.mode = {mode!r} with {devices.count(twice[0])} drafters on {twice[0]}:"
            " torch keeps one set of cudagraph trees a device, and the step of one drafter would"
            " overwrite the gradients of another",
            hint="set execution.mode = 'graphed', where every drafter has a pool of its own",
        )
    if accumulates and len(devices) > 1:
        raise ConfigError(
            f"execution.mode = {mode!r} with {len(devices)} drafters and optim.accumulate_steps > 1"
            ": the step mark of one drafter would let another overwrite the gradients that it still"
            " adds to",
            hint="set execution.mode = 'graphed'",
        )
