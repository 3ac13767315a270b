"""The memory plan of a run that need not be possible here: no GPU, no weights, no data."""

from dataclasses import dataclass

import torch

from dflash.config import RunConfig, resolved_devices
from dflash.target.sizes import read_sizes
from dflash.train.fit import Fit, advice, fits
from dflash.train.memory import GIB, DevicePlan, memory_plan, run_sizes

H200_GIB = 139.8
"""What torch reports of an H200, whose 141 GB are decimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan against the memory of its devices.

    ``fits`` has one entry a CUDA device; ``memory`` says whose memory that is; ``advice`` is what
    would help those that do not fit, or "".
    """

    plans: list[DevicePlan]
    fits: list[Fit]
    memory: str
    advice: str
    num_parameters: int
    num_anchors: int

    @property
    def too_large(self) -> list[Fit]:
        """The devices that cannot hold their plan."""
        return [fit for fit in self.fits if fit.state == "too large"]


def forecast(config: RunConfig, *, device_gib: float | None = None) -> Forecast:
    """Predict the memory of every device from the configuration and the target's config.json.

    Args:
        config: the run.
        device_gib: memory of every CUDA device; without it that of this machine's, if it has all
            that *config* names, else that of an H200.

    Raises:
        MissingError: the target's config is not there.
        ConfigError: it is of no causal LM.
    """
    num_cuda = max(torch.cuda.device_count(), 0 if device_gib is None else 1)
    named = {
        name
        for side in (config.target.devices, config.drafter.devices)
        for name in resolved_devices(side, num_cuda=num_cuda)
        if name.startswith("cuda")
    }
    drafts_on_gpu = "cuda" in resolved_devices(config.drafter.devices, num_cuda=num_cuda)[0]
    mode = config.execution.mode
    sizes = run_sizes(
        config,
        read_sizes(config.target),
        num_cuda=num_cuda,
        fused=drafts_on_gpu if mode == "auto" else mode != "eager",
    )
    available, memory = _memory_of(named, device_gib)
    judged = fits(memory_plan(sizes), available)
    lacking = [fit for fit in judged if fit.state != "fits"]
    return Forecast(
        plans=memory_plan(sizes),
        fits=judged,
        memory=memory,
        advice=advice(sizes, lacking) if lacking else "",
        num_parameters=sizes.shape.num_parameters,
        num_anchors=sizes.num_anchors,
    )


def _memory_of(named: set[str], device_gib: float | None) -> tuple[dict[str, int], str]:
    here = {f"cuda:{index}" for index in range(torch.cuda.device_count())}
    if device_gib is None and named and named <= here:
        total = {n: int(torch.cuda.get_device_properties(n).total_memory) for n in named}
        return total, "this machine's GPUs"
    size = H200_GIB if device_gib is None else device_gib
    why = "an H200" if device_gib is None else "--device-gib"
    return dict.fromkeys(named, int(size * GIB)), f"{size:g} GiB a GPU ({why})"
