"""A worker that never calls ``set_device`` records its events on GPU 0, and nobody waits for it.

Symptom
    No message. Values that are stale, or garbage, now and then; a loss that differs from run to
    run; memory of a context on GPU 0 for every worker. With a Triton kernel that is launched raw:
    an illegal instruction or illegal address.
Mechanism
    The current device belongs to the thread and starts as 0. Operators follow their tensors, but
    what has no tensor does not: ``torch.cuda.current_stream()``, ``Event.record()`` and
    ``torch.cuda.synchronize()`` take the current device. An event that should say "this slot is
    written" is recorded on a stream of GPU 0, where nothing happens, and is over at once.
Reproduce
    A target's thread works for tens of milliseconds on GPU 1, fills a feature slot there with ones
    and records its event, as ``run_target`` has it. The drafter takes the slot from the feed, which
    waits for the event. The fault takes ``set_device`` away from the target's thread.
Remedy
    ``dflash.pipeline.workers.run_target`` sets its device first; so does the drafter's loop. Lanes
    and runners also name a stream of their device for everything they do.
Verify
    0 positions are read before they are written.
Versions
    Any torch, with two GPUs. Read in the sources and in public reports. On two H200s with 2.11 the
    event was recorded on GPU 0, but earlier forms of this program read nothing stale: the record
    itself began GPU 0's context, which took longer than the products that it should have waited
    for. This form has not been tried.
Sources
    https://github.com/mstar-project/mstar/pull/180 (an executor's thread: raw Triton on device 0)
    https://github.com/triton-lang/triton/issues/3729 (no primary context in a fresh thread)
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dflash.diagnose.timeline import mark
from dflash.failures._mode import FailureMode
from dflash.failures._traffic import side_by_side
from dflash.pipeline.feed import Feed
from dflash.pipeline.idle import StreamIdle
from dflash.pipeline.lane import TargetLane
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.slots import BatchFacts, FeatureSlot, HostSlot, feature_slots
from dflash.pipeline.waiting import Waits
from dflash.pipeline.workers import run_target

NUM_POSITIONS, WIDTH, NUM_PRODUCTS = 8192, 8192, 60


class _SlowLane(TargetLane):
    """Writes ones behind some long products, on whatever stream is the thread's current one."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        random = torch.Generator(device).manual_seed(seed)
        self._weight = torch.randn(WIDTH, WIDTH, device=device, generator=random).bfloat16()
        # A kernel that is loaded on its first launch waits for what the device has to do.
        self._write_to(torch.empty_like(self._weight))

    def _write_to(self, ones: Tensor) -> None:
        out = self._weight
        for _ in range(NUM_PRODUCTS):
            out = (out @ self._weight).clamp(-1.0, 1.0)
        ones.copy_(out.square().clamp(1.0, 1.0))

    def run(self, _host: HostSlot, slot: FeatureSlot) -> None:
        self._write_to(slot.inputs.features_TC)
        assert slot.ready is not None
        slot.ready.record()
        mark("cuda", recorded_on=torch.cuda.current_device())
        slot.facts = BatchFacts(0, NUM_POSITIONS, NUM_POSITIONS, 1, ())


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many positions of a slot were read before they were written."""
    # GPU 0 is in use, as in any run: to begin with it takes longer than the products on GPU 1 do.
    torch.zeros(1, device="cuda:0").add_(1.0)
    torch.cuda.synchronize("cuda:0")
    device, life = torch.device("cuda", 1), Lifeline()
    dtype, lane = torch.bfloat16, _SlowLane(device, seed)
    slots = feature_slots(
        1, token_budget=NUM_POSITIONS, features_width=WIDTH, device=device, dtype=dtype
    )
    features, host = Ring(slots), Ring([HostSlot()])
    host.publish(0)
    feed = Feed(features, life, idle=StreamIdle(), waits=lambda: Waits(0.0, 0.0, 0.0, 0.0))
    read_TC = torch.zeros(NUM_POSITIONS, WIDTH, device=device, dtype=dtype)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)

    def read(tensors: Mapping[str, Tensor]) -> None:
        read_TC.copy_(tensors["features_TC"])
        mark("cuda", read_on=torch.cuda.current_device())

    def drafter() -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in feed.batches(1, into=read):
                pass

    if faulty:  # the worker stays on GPU 0
        torch.cuda.set_device = lambda device: None  # noqa: ARG005 - the fault
    target = partial(run_target, lane, host, [features], numbers=range(1), life=life)
    side_by_side(drafter, target, life)
    torch.cuda.synchronize(device)
    return float((read_TC != 1.0).any(dim=1).sum())


MODE = FailureMode(
    slug="wrong-device",
    measures="positions of a feature slot that are read before they are written",
    unit="of 8192 positions",
    limit=0.0,
    reproduce=reproduce,
    remedy=run_target,
    device="two gpus",
    child=True,
)
