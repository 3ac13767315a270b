"""The loader's and the target workers' loops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash.data.batch import PackedBatch
from dflash.execution import use_device
from dflash.pipeline.feed import wait_for
from dflash.pipeline.lane import TargetLane
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.slots import FeatureSlot, HostSlot

Assemble = Callable[[int, PackedBatch | None], PackedBatch]
"""Build the batch of a global number, into the given buffers when there are any."""


@dataclass(frozen=True, slots=True)
class Span:
    """The global batch numbers of a run: ``first`` up to, not including, ``end``."""

    first: int
    end: int

    def of(self, worker: int, num_workers: int) -> range:
        """The numbers that go to *worker* of *num_workers*: those congruent to it."""
        start = self.first + (worker - self.first) % num_workers
        return range(start, self.end, num_workers)


def load_batches(
    assemble: Assemble, rings: list[Ring[HostSlot]], *, span: Span, life: Lifeline
) -> None:
    """Assemble every batch of *span* in order, into the ring of the target that will run it."""
    for number in range(span.first, span.end):
        ring = rings[number % len(rings)]
        turn = number // len(rings)
        slot = ring.claim(turn, life)
        wait_for(slot.copied, life)
        slot.batch = assemble(number, slot.batch)
        ring.publish(turn)
        life.beat()


def run_target(
    lane: TargetLane,
    host_ring: Ring[HostSlot],
    feature_rings: list[Ring[FeatureSlot]],
    *,
    numbers: range,
    life: Lifeline,
) -> None:
    """Turn this target's share of the batches into features, in order."""
    use_device(lane.device)
    num_targets = numbers.step
    with torch.no_grad():
        for number in numbers:
            host = host_ring.take(number // num_targets, life)
            ring = feature_rings[number % len(feature_rings)]
            turn = number // len(feature_rings)
            lane.run(host, ring.claim(turn, life))
            host_ring.release(number // num_targets)
            ring.publish(turn)
            life.beat()
