"""The runner makes a program ready in one mode; then one worker thread feeds and calls it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash.execution.modes import Mode
from dflash.execution.program import Program, Region


class Runner:
    """A program in one execution mode.

    Build it and call ``warm_up`` in the main thread before any worker exists: that is where the
    first compilation of the process must happen (several threads that compile first at once crash
    or deadlock: pytorch#136833, #123177). Then one worker thread calls ``enter_worker`` once, and
    ``feed`` and parts for as long as it lives, with ``stream`` as its current stream.
    """

    def __init__(
        self, program: Program, mode: Mode, *, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.program = program
        self.mode = mode
        self.stream = stream
        self.warm_up_s = 0.0
        self._inputs = dict(program.inputs)
        self._parts = dict(program.parts)
        on_cuda = program.device.type == "cuda"
        for region in program.regions():
            if mode == "compiled" or (region.kernel and on_cuda):
                _compile_in_place(region)

    def warm_up(self) -> None:
        """Run every round twice on the inputs as they are, synchronised, leaving no trace.

        Twice, because the second run is the first one whose allocations all come from the cache.
        """
        started = time.perf_counter()
        self._synchronize()
        with torch.cuda.stream(self.stream), self.program.rehearsal():
            for _ in range(2):
                for parts in self.program.rounds:
                    for part in parts:
                        self._parts[part]()
                        self._synchronize()
        self.warm_up_s = time.perf_counter() - started

    def enter_worker(self) -> None:
        """Called once by the thread that will call this runner."""

    def feed(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy *tensors* into the program's inputs, on the current stream."""
        for name, into in self._inputs.items():
            into.copy_(tensors[name], non_blocking=True)

    def __call__(self, part: str) -> None:
        """Run one part; asynchronous on a CUDA device."""
        self._parts[part]()

    def _synchronize(self) -> None:
        if self.program.device.type == "cuda":
            torch.cuda.synchronize(self.program.device)


def _compile_in_place(region: Region) -> None:
    eager: Callable[..., Any] = getattr(region.owner, region.name)
    setattr(region.owner, region.name, torch.compile(eager, dynamic=region.dynamic))
