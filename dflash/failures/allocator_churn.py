"""Batches of ever other lengths make the allocator reserve several times what is in use.

Symptom
    Reserved memory climbs for as long as new lengths come, to several times what is allocated;
    device allocations never stop. Speed is the same until memory runs out: then
    ``torch.OutOfMemoryError`` with most of the device "reserved by PyTorch but unallocated", or,
    earlier, retries that wait for the device. Compiled code also compiles each new length, up to
    the limit of 8; graphs are captured for each, without one.
Mechanism
    The caching allocator (c10/cuda/CUDACachingAllocator.cpp) serves a request from a cached block
    that is large enough and cuts off the rest. A rest is too small for the next longer batch, so
    that one gets new device memory, and blocks are given back only when an allocation fails. How
    far it goes depends on the order: after the longest batch no other needs new memory.
Reproduce
    Sixty batches of 17,000 to 49,152 positions through an eager MLP and its optimizer: padded to
    49,152 and fed through the runner, or, for the fault, as long as they come. On a CPU: versions
    compiled for six lengths, over the one that a fixed shape takes.
Remedy
    ``dflash.execution.Runner.feed`` into static inputs of the token budget. In part also
    ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``, or the longest batch first.
Verify
    Peak reserved over peak allocated at most 1.2, and 0 device allocations after ten steps.
Versions
    Any torch. Seen on one H200 with 2.11: 63.5 GiB reserved at 13.3 GiB allocated, 28 device
    allocations after step 10; fixed: 15.1 GiB and 0; expandable segments: 14.7 GiB and 4.
    With 2.14.1: 4.39 times what is allocated, fixed 1.04 times.
Sources
    https://docs.pytorch.org/docs/stable/notes/cuda.html ; pytorch#119640, #131387, #196385
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from dflash.diagnose.timeline import mark
from dflash.execution import Mode, Region, Runner, TrainingStep
from dflash.execution.compiling import num_compiled
from dflash.execution.rounds import synchronize
from dflash.failures._mode import FailureMode

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

TOKEN_BUDGET, WIDTH, NUM_LAYERS, NUM_STEPS, SETTLED = 49_152, 4096, 3, 60, 10
MUCH = 2.0
_drawn = random.Random(1)  # one order for all launches, since the order decides how far it goes
LENGTHS = [_drawn.randint(17_000, TOKEN_BUDGET) for _ in range(NUM_STEPS)]


class _Wide(TrainingStep):
    """An MLP on whole batches; where it is compiled, by a backend that generates no code."""

    def __init__(self, device: str, *, width: int, budget: int, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [(nn.Linear(width, width), nn.GELU()) for _ in range(NUM_LAYERS)]
        model = nn.Sequential(*itertools.chain(*layers)).to(device, torch.bfloat16)
        static = torch.zeros(budget, width, device=device, dtype=torch.bfloat16)
        super().__init__(
            lambda inputs: model(inputs["x"]).square().mean(),
            optimizer=torch.optim.AdamW(model.parameters(), fused=True),
            inputs={"x": static},
        )

    def regions(self) -> list[Region]:
        return [Region(self, "loss", backend="eager")]


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return peak reserved over peak allocated bytes on a GPU."""
    step = _Wide("cuda", width=WIDTH, budget=TOKEN_BUDGET, seed=seed)
    series, device_allocations = "variable" if faulty else "fixed", []
    for number in _train(step, "eager", LENGTHS, faulty=faulty):
        memory = torch.cuda.memory_stats()
        reserved, allocated = (
            memory[f"{kind}_bytes.all.peak"] for kind in ("reserved", "allocated")
        )
        mark("memory", series=series, step=number, reserved=reserved, allocated=allocated)
        device_allocations.append(memory["num_device_alloc"])
    mark("note", late_device_allocations=device_allocations[-1] - device_allocations[SETTLED])
    return float(reserved / allocated)


def on_cpu(*, faulty: bool, seed: int = 0) -> float:
    """Return the compiled versions that six lengths take, over the one of a fixed shape."""
    step, before = _Wide("cpu", width=16, budget=64, seed=seed), num_compiled()
    for _ in _train(step, "compiled", [40, 33, 64, 50, 21, 57], faulty=faulty):
        mark("compile", versions=num_compiled() - before)
    return float(num_compiled() - before)


def _train(step: _Wide, mode: Mode, lengths: Sequence[int], *, faulty: bool) -> Iterator[int]:
    """Train on batches of *lengths*; yield the number of every step when its device is done."""
    runner = Runner(step, mode)
    static = step.inputs["x"]
    host = torch.empty(static.shape, dtype=static.dtype, pin_memory=static.is_cuda)
    for number, length in enumerate(lengths):
        host[:length] = 1.0
        if faulty:
            step.inputs["x"] = host[:length].to(step.device)  # the fault: as long as it comes
        else:
            host[length:] = 0.0
            runner.feed({"x": host})
        runner("normal")
        runner("update")
        synchronize(step.device)
        yield number


def _growing(run: "FinishedRun") -> Iterator[str]:
    """Devices that went on allocating, and end with twice as much reserved as was ever in use."""
    for now in run.settled:
        for device, used in now.allocated_gib.items():
            new = now.new_device_allocs.get(device, 0)
            if new and now.reserved_gib[device] > MUCH * used:
                held = f"{now.reserved_gib[device]:.1f} GiB reserved for {used:.1f} GiB"
                yield f"{now.when}: {held} on {device}, {new} more device allocations"


MODE = FailureMode(
    slug="allocator-churn",
    measures="peak memory reserved over allocated; on a CPU, compiled versions over the one needed",
    unit="1",
    limit=1.2,
    reproduce=reproduce,
    remedy=Runner.feed,
    device="gpu",
    part_on_cpu=on_cpu,
    child=True,
    deaths=frozenset({"out of memory"}),
    detect=_growing,
    time_limit_s=120.0,
)
