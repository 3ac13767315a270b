"""Whether a memory plan fits into the devices, and what would make it fit and by how much."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dflash.config import RunConfig, resolved_devices
from dflash.drafter.masks import TILE
from dflash.errors import DeviceMemoryError, DflashError
from dflash.pipeline.supervisor import memory_error
from dflash.target.sizes import read_sizes
from dflash.train.memory import GIB, DevicePlan, RunSizes, memory_plan, run_sizes

OUTSIDE_BYTES = 2**30
"""What a device needs besides torch's tensors: kernels, library workspaces, NCCL's buffers."""

CERTAIN_SHARE = 0.9
"""A plan counts some tensors that a compiler manages to do without. Below this share of it nothing
was seen to run, so only then a run is refused; between the two it is called tight."""

State = Literal["fits", "tight", "too large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One device's plan against the memory it has."""

    plan: DevicePlan
    available_bytes: int

    @property
    def state(self) -> State:
        """``too large`` cannot run, ``tight`` may run out of memory."""
        if self.plan.predicted_bytes + OUTSIDE_BYTES <= self.available_bytes:
            return "fits"
        certain = CERTAIN_SHARE * self.plan.predicted_bytes
        return "tight" if certain <= self.available_bytes else "too large"

    def __str__(self) -> str:
        needs = f"{self.plan.device} needs {_gib(self.plan.predicted_bytes)} and 1 GiB for CUDA"
        return f"{needs}, and has {_gib(self.available_bytes)}"


def fits(plans: Sequence[DevicePlan], available: Mapping[str, int]) -> list[Fit]:
    """Compare the plans of all devices whose memory is known."""
    return [
        Fit(plan=plan, available_bytes=available[plan.device])
        for plan in plans
        if plan.device in available
    ]


def free_memory(sizes: RunSizes) -> dict[str, int]:
    """Bytes that a new run may use on each CUDA device, by its name."""
    names = {name for name in (*sizes.targets, *sizes.drafters) if name.startswith("cuda")}
    return {
        name: torch.cuda.mem_get_info(name)[0] + torch.cuda.memory_reserved(name)
        for name in sorted(names)
    }


def require_room(config: RunConfig, *, fused: bool) -> list[str]:
    """Compare a run with the free memory of its GPUs, before anything is loaded.

    Returns:
        a sentence for every device that is tight, or the reason why there is no plan: what is
        wrong with the target is for its loading to say.

    Raises:
        DeviceMemoryError: a device cannot hold its plan; says what would help, and by how much.
    """
    if not any(name.startswith("cuda") for name in _names(config)):
        return []
    try:
        sizes = sizes_of_run(config, fused=fused)
    except DflashError as error:
        return [f"memory was not planned: {error.what}"]
    return require_fit(sizes, free_memory(sizes))


def require_fit(sizes: RunSizes, available: Mapping[str, int]) -> list[str]:
    """The same for *sizes* on devices that have *available* bytes."""
    judged = fits(memory_plan(sizes), available)
    bad = [fit for fit in judged if fit.state == "too large"]
    if bad:
        what = "; ".join(str(fit) for fit in bad)
        raise DeviceMemoryError(f"the run cannot fit: {what}", hint=advice(sizes, bad))
    return [f"memory is tight: {fit}" for fit in judged if fit.state == "tight"]


def sizes_of_run(config: RunConfig, *, fused: bool) -> RunSizes:
    """The sizes of a run on this machine, from its configuration and the target's config."""
    num_cuda = torch.cuda.device_count()
    return run_sizes(config, read_sizes(config.target), num_cuda=num_cuda, fused=fused)


@contextmanager
def advised(config: RunConfig, *, fused: bool) -> Iterator[None]:
    """Let what runs out of device memory inside say what would help, with numbers.

    Raises:
        DeviceMemoryError: this thread or a worker ran out of device memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raised = memory_error("the main thread", error)
        raise _with_advice(raised, config, fused=fused) from error
    except DeviceMemoryError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise  # predicted, so it has its advice
        raise _with_advice(error, config, fused=fused) from error.__cause__


def advice(sizes: RunSizes, bad: Sequence[Fit]) -> str:
    """Return what to change, and what the devices of *bad* would then need."""
    shown, settled = [], set[str]()
    for key, value, changed in _changes(sizes):
        if key in settled:
            continue
        plans = {plan.device: plan for plan in memory_plan(changed)}
        after = [replace(fit, plan=plans[fit.plan.device]) for fit in bad]
        saved = [
            b.plan.predicted_bytes - a.plan.predicted_bytes for a, b in zip(after, bad, strict=True)
        ]
        if min(saved) <= 0:
            continue
        enough = all(fit.state == "fits" for fit in after)
        settled |= {key} if enough else set()
        shown.append(f"{key}{value} -> {_each(after)}" + ("" if enough else " (not enough alone)"))
    return "; ".join(shown) or "take devices with more memory, or a smaller target"


def _changes(sizes: RunSizes) -> Iterator[tuple[str, str, RunSizes]]:
    """Key, new value, and the run with it; a later value of the same key is a larger change."""
    if not sizes.checkpoint:
        changed = replace(sizes, checkpoint=True)
        yield "execution.activation_checkpointing", " = true", changed
    for part in (2, 4, 8, 16):
        budget = sizes.token_budget // part // TILE * TILE
        if budget:
            yield "data.token_budget", f" = {budget}", replace(sizes, token_budget=budget)
    half = sizes.anchor_density / 2
    yield "data.anchor_density", f" = {half:.4g}", replace(sizes, anchor_density=half)
    shared = sorted(set(sizes.targets) & set(sizes.drafters))
    if shared:
        moved = tuple("another" if name in shared else name for name in sizes.targets)
        where = f" without {', '.join(shared)}, the target on a GPU of its own"
        yield "target.devices", where, replace(sizes, targets=moved)
    if sizes.target_dtype == torch.float32:
        yield "target.dtype", ' = "bf16"', replace(sizes, target_dtype=torch.bfloat16)
    if sizes.compute_dtype == torch.float32:
        yield "precision.compute", ' = "bf16"', replace(sizes, compute_dtype=torch.bfloat16)


def _with_advice(error: DeviceMemoryError, config: RunConfig, *, fused: bool) -> DeviceMemoryError:
    """The same error; its device is the one that torch's message names, else every GPU."""
    try:
        sizes = sizes_of_run(config, fused=fused)
    except DflashError:
        return error
    named = re.search(r"GPU (\d+)", error.what)
    plans = [plan for plan in memory_plan(sizes) if plan.device != "cpu"]
    told = [plan for plan in plans if named and plan.device == f"cuda:{named[1]}"] or plans
    if not told:
        return error
    available = {plan.device: int(torch.cuda.mem_get_info(plan.device)[1]) for plan in told}
    full = DeviceMemoryError(error.what, hint=advice(sizes, fits(told, available)))
    full.threads_left = error.threads_left
    return full


def _names(config: RunConfig) -> tuple[str, ...]:
    num_cuda = torch.cuda.device_count()
    sides = (config.target.devices, config.drafter.devices)
    return tuple(name for side in sides for name in resolved_devices(side, num_cuda=num_cuda))


def _each(after: Sequence[Fit]) -> str:
    sizes = {fit.plan.device: _gib(fit.plan.predicted_bytes) for fit in after}
    if len(set(sizes.values())) > 1:
        return ", ".join(f"{device} {size}" for device, size in sizes.items())
    return next(iter(sizes.values())) + (" each" if len(sizes) > 1 else "")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
