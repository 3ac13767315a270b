"""Several drafters, one model: the sum of gradients that keeps their weights bit-equal."""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from dflash.errors import MissingError
from dflash.execution import on_stream
from dflash.pipeline.lifeline import TICK_S, Lifeline
from dflash.pipeline.slots import BatchFacts
from dflash.train.devices import SumChoice
from dflash.train.step import TrainStep


class Rendezvous:
    """A barrier whose waiters leave as soon as the run is stopped."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._arrived = 0
        self._round = 0
        self._changed = threading.Condition()

    def meet(self, life: Lifeline, *, last: Callable[[], None] = lambda: None) -> None:
        """Return when all parties have come; raise Halted when the run stops first.

        The one that comes last calls *last* before anybody leaves.
        """
        with self._changed:
            self._arrived += 1
            mine = self._round
            if self._arrived == self._parties:
                last()
                self._arrived = 0
                self._round += 1
                self._changed.notify_all()
            while self._round == mine:
                life.check()
                self._changed.wait(TICK_S)


class GradientSum:
    """Sums gradients and measurements over all drafters of this process, in place.

    With ``nccl`` the last drafter to arrive queues the whole sum, for every device on its drafter's
    own stream, while the others wait: NCCL calls from two threads can deadlock (pytorch#175145),
    and the streams' order is all the synchronisation there is.

    In ``fixed_order`` every replica sums its own share of the tensors and writes the sum back to
    all, so that work and traffic are spread evenly. Either way all receive the very same bits.
    """

    def __init__(
        self,
        steps: Sequence[TrainStep],
        choice: SumChoice,
        *,
        streams: Sequence[torch.cuda.Stream | None],
    ) -> None:
        self.choice = choice
        self._steps = steps
        self._streams = streams
        self._rendezvous = Rendezvous(len(steps))
        self._batches: list[list[BatchFacts]] = [[] for _ in steps]
        self._everyone: list[BatchFacts] = []
        on_gpus = steps[0].device.type == "cuda"
        self._queued = [torch.cuda.Event() if on_gpus else None for _ in steps]
        self._summed = [torch.cuda.Event() if on_gpus else None for _ in steps]
        self._visitors: list[Tensor | None] = [None for _ in steps]

    @property
    def notes(self) -> list[str]:
        """How several drafters are summed, and why."""
        if len(self._steps) == 1:
            return []
        return [f"gradients are summed by {self.choice.kind}: {self.choice.why}"]

    def warm_up(self) -> None:
        """Make what sums will need; in the main thread, before runners warm up.

        Where NCCL fails although everything speaks for it, ``choice`` becomes the fixed order and
        says why.

        Raises:
            MissingError: NCCL fails and was asked for.
        """
        if self.choice.kind == "nccl":
            try:
                self._try_nccl()
            except RuntimeError as error:
                self.choice = _without_nccl(self.choice, error)
        if self.choice.kind == "fixed_order":
            for replica, step in enumerate(self._steps):
                if any(step.device != other.device for other in self._steps):
                    self._visitors[replica] = _visitor(step)

    def _try_nccl(self) -> None:
        """Make communicators and connections, by sums as large as those that will come.

        They are on tensors of their own, whose memory runners find in the allocator's cache.
        """
        for numel, dtype in _sizes_of_sums(self._steps[0]):
            copies = []
            for step, stream in zip(self._steps, self._streams, strict=True):
                with on_stream(stream):
                    copies.append(torch.zeros(numel, dtype=dtype, device=step.device))
            self._all_reduce(copies)
        for step in self._steps:
            torch.cuda.synchronize(step.device)

    def __call__(self, replica: int, batches: list[BatchFacts], life: Lifeline) -> list[BatchFacts]:
        """Called by every drafter's thread after the last of its *batches*; needs no other for one.

        Returns:
            the batches of all drafters that are in the sum, by their number.
        """
        if len(self._steps) == 1:
            return batches
        self._batches[replica] = batches
        if self.choice.kind == "nccl":
            self._rendezvous.meet(life, last=self._sum_by_nccl)
            return self._everyone
        self._meet(self._queued, replica, life)
        with torch.no_grad():
            for tensors in self._share(replica):
                _sum_in_place(tensors, replica, visitor=self._visitors[replica])
        self._meet(self._summed, replica, life)
        return self._everyone

    def _sum_by_nccl(self) -> None:
        self._gather_facts()
        for copies in self._tensors():
            self._all_reduce(copies)

    def _all_reduce(self, copies: Sequence[Tensor]) -> None:
        nccl.all_reduce(copies, streams=self._streams)

    def _gather_facts(self) -> None:
        everyone = [facts for share in self._batches for facts in share]
        self._everyone = sorted(everyone, key=lambda facts: facts.number)

    def _meet(
        self, events: Sequence[torch.cuda.Event | None], replica: int, life: Lifeline
    ) -> None:
        mine = events[replica]
        if mine is not None:
            mine.record()
        self._rendezvous.meet(life, last=self._gather_facts)
        for event in events:
            if event is not None and event is not mine:
                event.wait()

    def _tensors(self) -> Iterable[tuple[Tensor, ...]]:
        """What is summed: for each tensor its copies, one a replica."""
        per_step = [[*step.gradients(), step.totals.step_sums] for step in self._steps]
        return zip(*per_step, strict=True)

    def _share(self, replica: int) -> list[tuple[Tensor, ...]]:
        num = len(self._steps)
        return [copies for index, copies in enumerate(self._tensors()) if index % num == replica]


def _without_nccl(choice: SumChoice, error: RuntimeError) -> SumChoice:
    first = str(error).strip().splitlines()[0]
    if choice.is_asked_for:
        raise MissingError(
            f'execution.gradient_sum = "nccl", but NCCL cannot sum here: {first}',
            hint="NCCL_DEBUG=WARN makes it say more; NCCL_NVLS_ENABLE=0 helps where multicast is"
            ' not allowed; "auto" and "fixed_order" do without it',
        ) from error
    return SumChoice("fixed_order", f"NCCL was tried and cannot sum here: {first}")


def _sizes_of_sums(step: TrainStep) -> list[tuple[int, torch.dtype]]:
    """Every different (numel, dtype) that may be summed, the largest first."""
    found = {(p.numel(), dtype) for p in step.parameters for dtype in (p.dtype, torch.float32)}
    found.add((step.totals.step_sums.numel(), step.totals.step_sums.dtype))
    return sorted(found, key=lambda size: -size[0] * size[1].itemsize)


def _visitor(step: TrainStep) -> Tensor:
    """A place for one tensor of another device: bytes for the largest that may be summed."""
    numel, dtype = _sizes_of_sums(step)[0]
    return torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=step.device)


def _sum_in_place(copies: Sequence[Tensor], replica: int, *, visitor: Tensor | None) -> None:
    """Add up all copies in *replica*'s own, starting from it, and write the sum to the others."""
    total = copies[replica]
    others = [copy for index, copy in enumerate(copies) if index != replica]
    for other in others:
        if other.device != total.device:
            assert visitor is not None, "there is no place for a tensor of another device"
            place = visitor[: other.nbytes].view(other.dtype).view(other.shape)
            total += place.copy_(other, non_blocking=True)
        else:
            total += other
    for other in others:
        other.copy_(total, non_blocking=True)
