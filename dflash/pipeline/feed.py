"""What a drafter thread sees of the pipeline: its batches, in order."""

import time
from collections.abc import Callable, Iterator

import torch

from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.slots import BatchFacts, FeatureSlot


class Feed:
    """The feature slots of one drafter, handed out in batch order; used by one thread."""

    def __init__(
        self, ring: Ring[FeatureSlot], life: Lifeline, *, data_wait_s: Callable[[], float]
    ) -> None:
        self._ring = ring
        self._turn = ring.first_turn
        self.life = life
        self.data_wait_s = data_wait_s

    @property
    def wait_s(self) -> float:
        """Seconds this drafter has waited for a ready slot."""
        return self._ring.consumer_wait_s

    @property
    def target_wait_s(self) -> float:
        """Seconds the target workers have waited for a free slot of this drafter."""
        return self._ring.producer_wait_s

    def batches(self, count: int) -> Iterator[tuple[int, BatchFacts]]:
        """Yield (slot number, facts) of the next *count* batches.

        The slot is the caller's until it asks for the next one: it must have queued all its reads
        on the current stream by then.
        """
        for _ in range(count):
            slot = self._ring.take(self._turn, self.life)
            if slot.ready is not None:
                slot.ready.wait()
            assert slot.facts is not None, "the ring published an empty feature slot"
            yield self._ring.number(self._turn), slot.facts
            if slot.free is not None:
                slot.free.record()
            self._ring.release(self._turn)
            self._turn += 1
            self.life.beat()


def wait_for(event: torch.cuda.Event | None, life: Lifeline, *, poll_s: float = 0.001) -> None:
    """Wait on the host until *event* has happened, ending early when the run is stopped."""
    while event is not None and not event.query():
        life.check()
        time.sleep(poll_s)
