"""A user's own step as a program that the execution modes can run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash.execution import Region

MakeStep = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]


class UserProgram:
    """What ``make_step(device)`` returns, called over and over on the same inputs.

    The step may be a forward pass, or one with its backward and an optimizer's move: a rehearsal
    leaves the user's own traces, since nobody else knows of them.
    """

    rounds = (("normal",),)

    def __init__(self, make_step: MakeStep, *, device: str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.step, arguments = make_step(self.device)
        self._arguments = tuple(arguments)
        tensors = [each for each in self._arguments if isinstance(each, Tensor)]
        self.inputs = {f"input {number}": tensor for number, tensor in enumerate(tensors)}
        self.parts = {"normal": self._call}
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def regions(self) -> list[Region]:
        """The whole step; without a GPU its code is not generated, which takes a C++ compiler."""
        backend = "inductor" if self.device.type == "cuda" else "aot_eager"
        return [Region(self, "step", backend=backend)]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Count nothing inside."""
        kept = self._sums.clone()
        self._sums.zero_()
        try:
            yield
        finally:
            self._sums.copy_(kept)

    def probe(self) -> Tensor:
        """Sum of what the step returned, where it is one tensor, and the number of calls."""
        return self._sums.clone()

    def carried(self) -> list[Tensor | None]:
        """Nothing that anybody could know of."""
        return []

    def carry(self, tensors: Sequence[Tensor | None]) -> None:
        """Nothing."""

    def _call(self) -> None:
        output = self.step(*self._arguments)
        if isinstance(output, Tensor):
            self._sums[0] += output.detach().sum()
        self._sums[1] += 1
