"""Several drafters, one model: the sum of gradients that keeps their weights bit-equal."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.pipeline.lifeline import TICK_S, Lifeline
from dflash.pipeline.slots import BatchFacts
from dflash.train.step import TrainStep


class Rendezvous:
    """A barrier whose waiters leave as soon as the run is stopped."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._round = 0
        self._changed = threading.Condition()

    def meet(self, life: Lifeline) -> None:
        """Return when all parties have come; raise Halted when the run stops first."""
        with self._changed:
            self._arrived += 1
            mine = self._round
            if self._arrived == self._parties:
                self._arrived = 0
                self._round += 1
                self._changed.notify_all()
            while self._round == mine:
                life.check()
                self._changed.wait(TICK_S)


class GradientSum:
    """Sums gradients and measurements over all drafters of this process, in a fixed order.

    Every replica sums its own share of the parameters over all replicas and writes the sum back to
    each of them, so the work and the traffic are spread evenly, and all replicas receive the very
    same bits.
    """

    def __init__(self, steps: Sequence[TrainStep]) -> None:
        self._steps = steps
        self._rendezvous = Rendezvous(len(steps))
        self._batches: list[list[BatchFacts]] = [[] for _ in steps]
        cuda = steps[0].device.type == "cuda"
        self._queued = [torch.cuda.Event() if cuda else None for _ in steps]
        self._summed = [torch.cuda.Event() if cuda else None for _ in steps]

    def __call__(self, replica: int, batches: list[BatchFacts], life: Lifeline) -> list[BatchFacts]:
        """Called by every drafter's thread after the last of its *batches*; needs no other for one.

        Returns:
            the batches of all drafters that are in the sum, by their number.
        """
        if len(self._steps) == 1:
            return batches
        self._batches[replica] = batches
        self._meet(self._queued, replica, life)
        everyone = [facts for share in self._batches for facts in share]
        with torch.no_grad():
            for tensors in self._share(replica):
                _sum_in_place(tensors, replica)
        self._meet(self._summed, replica, life)
        return sorted(everyone, key=lambda facts: facts.number)

    def _meet(
        self, events: Sequence[torch.cuda.Event | None], replica: int, life: Lifeline
    ) -> None:
        mine = events[replica]
        if mine is not None:
            mine.record()
        self._rendezvous.meet(life)
        for event in events:
            if event is not None and event is not mine:
                event.wait()

    def _share(self, replica: int) -> list[list[Tensor]]:
        per_step = [[*step.gradients(), step.totals.step_sums] for step in self._steps]
        return [
            list(tensors)
            for index, tensors in enumerate(zip(*per_step, strict=True))
            if index % len(self._steps) == replica
        ]


def _sum_in_place(tensors: Sequence[Tensor], replica: int) -> None:
    here = tensors[replica].device
    total = tensors[0].to(here, copy=True)
    for other in tensors[1:]:
        total += other.to(here)
    for tensor in tensors:
        tensor.copy_(total)
