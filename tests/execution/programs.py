"""Small programs for the tests of ``dflash.execution``; they know nothing of drafters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from dflash.execution import Region

CPU = torch.device("cpu")
ROUNDS = (("normal", "update"),)


class Counting:
    """Counts its calls; its one region doubles a tensor, and ``probe`` holds the last result."""

    def __init__(self, rounds: Sequence[Sequence[str]] = ROUNDS) -> None:
        self.device = CPU
        self.calls: list[tuple[str, float, bool]] = []
        self.rehearsing = False
        self.double: Callable[[Tensor], Tensor] = lambda x: x * 2
        self.inputs = {"number": torch.zeros(())}
        self.rounds = rounds
        self.result = torch.zeros(())
        self.left: list[Tensor | None] = []

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        names = dict.fromkeys(part for parts in self.rounds for part in parts)
        return {name: partial(self._part, name) for name in names}

    def regions(self) -> list[Region]:
        return [Region(self, "double")]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    def probe(self) -> Tensor:
        return self.result.double()[None]

    def carried(self) -> list[Tensor | None]:
        return self.left

    def carry(self, tensors: Sequence[Tensor | None]) -> None:
        self.left = list(tensors)

    def _part(self, name: str) -> None:
        self.calls.append((name, float(self.inputs["number"].sum()), self.rehearsing))
        self.result = self.double(self.inputs["number"] + 1)


def number(value: float) -> dict[str, Tensor]:
    return {"number": torch.tensor(value)}
