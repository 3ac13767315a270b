"""What a drafter thread sees of the pipeline: its batches, in order."""

import time
from collections.abc import Callable, Iterator

import torch

from dflash.pipeline.idle import StreamIdle
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.slots import BatchFacts, FeatureSlot
from dflash.pipeline.waiting import Waits


class Feed:
    """The feature slots of one drafter, handed out in batch order; used by one thread.

    ``waits`` tells who has waited for whom so far, over all workers of the run.
    """

    def __init__(
        self,
        ring: Ring[FeatureSlot],
        life: Lifeline,
        *,
        idle: StreamIdle,
        waits: Callable[[], Waits],
    ) -> None:
        self._ring = ring
        self._turn = ring.first_turn
        self._idle = idle
        self.life = life
        self.waits = waits

    def batches(self, count: int) -> Iterator[tuple[int, BatchFacts]]:
        """Yield (slot number, facts) of the next *count* batches.

        The slot is the caller's until it asks for the next one: it must have queued all its reads
        on the current stream by then.
        """
        for _ in range(count):
            slot = self._ring.take(self._turn, self.life)
            if slot.ready is not None:
                with self._idle.waiting():
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
