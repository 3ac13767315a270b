"""Running the rounds of a program once, without a trace, and comparing what they left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.execution.faults import ANOTHER_MODE, NumericsError
from dflash.execution.program import Program

TOLERANCE = 1e-4
"""Of each sum, relative: where kernels add with atomics two launched runs differ too, in the last
bits of fp32 sums and so in single bf16 values, which average out in sums over a whole batch."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The probe that all rounds left, on the host, and how long they took with their device."""

    probe: Tensor
    seconds: float


class Order:
    """Parts as they come, held to the rounds of a program; a part may follow itself."""

    def __init__(self, rounds: Sequence[Sequence[str]]) -> None:
        self._rounds = [tuple(parts) for parts in rounds]
        self._done: tuple[str, ...] = ()

    def follow(self, part: str) -> None:
        """Take *part* as the next one.

        Raises:
            ValueError: it does not come next in any round, and begins none.
        """
        done = (*self._done, part)
        if any(parts[: len(done)] == done for parts in self._rounds):
            self._done = () if done in self._rounds else done
        elif part in self._done[-1:]:
            return
        elif any(parts[0] == part for parts in self._rounds):
            self._done = () if (part,) in self._rounds else (part,)
        else:
            after = self._done[-1] if self._done else "the start"
            rounds = "; ".join(", ".join(parts) for parts in self._rounds)
            raise ValueError(f"part {part!r} does not follow {after} in any round: {rounds}")


def rehearse(program: Program, run: Callable[[str], None]) -> Rehearsed:
    """Let *run* do every part of every round once, on the inputs as they are."""
    synchronize(program.device)
    started = time.perf_counter()
    with program.rehearsal():
        for parts in program.rounds:
            for part in parts:
                run(part)
        probe = program.probe().cpu()
    return Rehearsed(probe, time.perf_counter() - started)


def difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference of two probes, relative; 0.0 means bit for bit, NaN equals NaN."""
    expected, found = expected.nan_to_num(), found.nan_to_num()
    scale = torch.maximum(expected.abs(), found.abs()).clamp(min=1e-30)
    return float(((expected - found).abs() / scale).max()) if expected.numel() else 0.0


def check_same(expected: Tensor, found: Tensor, *, limit: float, what: str) -> float:
    """Return the difference of two probes.

    Raises:
        NumericsError: it is above *limit*.
    """
    apart = difference(expected, found)
    if apart <= limit:
        return apart
    allowed = f"up to {limit:g}" if limit else "none"
    raise NumericsError(
        f"{what} gives other numbers than launching the same kernels: sums differ by {apart:.3g}"
        f" relative, allowed is {allowed}; launched {expected.tolist()}, found {found.tolist()}",
        hint=ANOTHER_MODE,
    )


def synchronize(device: torch.device) -> None:
    """Wait for *device*, where it is one that runs behind its threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
