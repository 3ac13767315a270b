"""Whether the replicas still hold the same bits: checksums made on the devices, compared late."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.errors import ReplicasDifferError
from dflash.execution import on_stream
from dflash.pipeline.lifeline import TICK_S, Lifeline
from dflash.train.step import TrainStep

WORD_BYTES = 8
BITS_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Round:
    """One step's checksums, of every replica that has made them so far."""

    step: int
    sums: dict[int, Tensor] = field(default_factory=dict)
    arrived: dict[int, torch.cuda.Event] = field(default_factory=dict)


class Agreement:
    """Compares weights and optimizer state of all replicas every so many steps, and at the last.

    No step waits for it: checksums travel to the host behind the step that they are of, and are
    compared when they have arrived, at the latest before the next checkpoint.
    """

    def __init__(self, steps: Sequence[TrainStep], *, every_steps: int, last_step: int) -> None:
        self._steps = steps
        self._every_steps = every_steps if len(steps) > 1 else 0
        self._last_step = last_step
        self._rounds: list[_Round] = []
        self._changed = threading.Condition()
        self.last_agreed: int | None = None

    def due(self, step: int) -> bool:
        """Whether the replicas are compared after step *step*, counted from 1."""
        every = self._every_steps
        return bool(every) and (step % every == 0 or step == self._last_step)

    def warm_up(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        """Make every replica's checksums once, so that a later time allocates nothing."""
        if not self._every_steps:
            return
        for step, stream in zip(self._steps, streams, strict=True):
            with on_stream(stream):
                checksums(step)

    def __call__(self, replica: int, step: int) -> None:
        """Queue the checksums of *replica* as it is after *step*; called in its own thread.

        Raises:
            ReplicasDifferError: an earlier comparison has come to its end, badly.
        """
        if self.due(step):
            on_device = checksums(self._steps[replica])
            arrived = None
            if on_device.is_cuda:
                sums = torch.empty_like(on_device, device="cpu", pin_memory=True)
                sums.copy_(on_device, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            else:
                sums = on_device
            self._add(replica, step, sums, arrived=arrived)
        if replica == 0:
            while self._rounds and self._is_complete(self._rounds[0]):
                self._compare(self._rounds[0])

    def settle(self, life: Lifeline) -> None:
        """Compare everything that is queued, waiting for replicas that are behind.

        Called by replica 0's thread before it writes or judges its weights.

        Raises:
            ReplicasDifferError: two replicas differ.
        """
        while self._rounds:
            first = self._rounds[0]
            with self._changed:
                while len(first.sums) < len(self._steps):
                    life.check()
                    self._changed.wait(TICK_S)
            for event in first.arrived.values():
                event.synchronize()
            self._compare(first)

    def _add(
        self, replica: int, step: int, sums: Tensor, *, arrived: torch.cuda.Event | None
    ) -> None:
        with self._changed:
            found = next((round_ for round_ in self._rounds if round_.step == step), None)
            if found is None:
                self._rounds.append(found := _Round(step))
            if arrived is not None:
                found.arrived[replica] = arrived
            found.sums[replica] = sums
            self._changed.notify_all()

    def _is_complete(self, first: _Round) -> bool:
        with self._changed:
            all_here = len(first.sums) == len(self._steps)
        return all_here and all(event.query() for event in first.arrived.values())

    def _compare(self, done: _Round) -> None:
        with self._changed:
            self._rounds.remove(done)
        for replica in range(1, len(self._steps)):
            different = (done.sums[replica] != done.sums[0]).nonzero().flatten().tolist()
            if different:
                self._raise(done.step, replica, different)
        self.last_agreed = done.step

    def _raise(self, step: int, replica: int, different: list[int]) -> None:
        names = list(_compared(self._steps[0]))
        more = f" and {len(different) - 1} more tensors" if len(different) > 1 else ""
        sound = (
            "this was the first comparison: go back to the checkpoint that the run began with, or"
            " start anew"
            if self.last_agreed is None
            else f"they were equal up to step {self.last_agreed}: go on from a checkpoint no later"
            " than that, or start anew where there is none"
        )
        raise ReplicasDifferError(
            f"step {step}: {names[different[0]]}{more} of drafter {replica} on"
            f" {self._steps[replica].device} differs from drafter 0's on {self._steps[0].device},"
            " so the replicas no longer train one model",
            hint=f'{sound}, with execution.gradient_sum = "fixed_order" if it happens again, and'
            " look for memory errors of these devices",
        )


def checksums(step: TrainStep) -> Tensor:
    """Return int64, one checksum a tensor of weights and optimizer state, on the step's device."""
    return torch.stack([_checksum(tensor) for tensor in _compared(step).values()])


def _compared(step: TrainStep) -> dict[str, Tensor]:
    """Weights, the masters that they are rounded from where there are such, and moments."""
    weights = dict(step.loss.drafter.named_parameters())
    rounded = [name for name, weight in weights.items() if weight.dtype != torch.float32]
    return {
        **weights,
        **{f"fp32 master of {name}": step.masters[name] for name in rounded},
        **step.moments(),
    }


def _checksum(tensor: Tensor) -> Tensor:
    """Sum the bits as whole numbers, wrapping around; exact, so the order does not matter.

    Eight bytes are read as one number: a narrower sum would first make a wide copy of the tensor.
    """
    flat = tensor.detach().reshape(-1)
    size, start = flat.element_size(), flat.storage_offset() * flat.element_size()
    if flat.numel() * size % WORD_BYTES or start % WORD_BYTES:
        return flat.view(BITS_OF_SIZE[size]).sum(dtype=torch.int64)
    return flat.view(torch.int64).sum()
