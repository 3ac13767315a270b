"""What a drafter thread sees of the pipeline: its batches, in order."""

import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

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

    def batches(
        self, count: int, *, into: Callable[[Mapping[str, Tensor]], None]
    ) -> Iterator[BatchFacts]:
        """Give each of the next *count* batches to *into*, and then yield its facts.

        *into* copies what it is given on the current stream; the slot is the target's again right
        after it, before the step that reads the copy has even been queued.
        """
        for _ in range(count):
            slot = self._ring.take(self._turn, self.life)
            if slot.ready is not None:
                with self._idle.waiting():
                    slot.ready.wait()
            assert slot.facts is not None, "the ring published an empty feature slot"
            facts = slot.facts
            into(slot.inputs._asdict())
            if slot.free is not None:
                slot.free.record()
            self._ring.release(self._turn)
            self._turn += 1
            yield facts
            self.life.beat()


def wait_for(event: torch.cuda.Event | None, life: Lifeline, *, poll_s: float = 0.001) -> None:
    """Wait on the host until *event* has happened, ending early when the run is stopped."""
    while event is not None and not event.query():
        life.check()
        time.sleep(poll_s)
