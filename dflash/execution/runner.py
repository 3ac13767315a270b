"""A program, and the runner that makes it ready in one mode."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash.execution.modes import Mode


@dataclass(frozen=True, slots=True)
class Region:
    """A function held by attribute ``name`` of ``owner`` that a compiling mode may replace.

    It takes tensors of one static shape per signature and contains no host synchronisation.
    """

    owner: object
    name: str


class Program(Protocol):
    """What one worker repeats on one device.

    ``parts`` maps a signature ("normal", "metric", "update") to a callable over static buffers;
    its argument is the number of the input slot it reads. ``rehearsal`` is a context in which the
    parts may be called without leaving a trace in weights, optimizer state or metrics.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def parts(self) -> dict[str, Callable[[int], None]]: ...

    def regions(self) -> Iterable[Region]: ...

    def rehearsal(self) -> AbstractContextManager[None]: ...


class Runner:
    """A program in one execution mode.

    Build it and call ``warm_up`` in the main thread before any worker exists: that is where the
    first compilation of the process must happen (several threads that compile first at once crash
    or deadlock: pytorch#136833, #123177). Afterwards one worker thread calls it.
    """

    def __init__(self, program: Program, mode: Mode) -> None:
        self.program = program
        self.mode = mode
        self.warm_up_s = 0.0
        self._parts = program.parts
        if mode == "compiled":
            for region in program.regions():
                _compile_in_place(region)

    def warm_up(self, *, stream: torch.cuda.Stream | None = None) -> None:
        """Run every part twice on slot 0, synchronised, leaving no trace.

        Twice, because the second run is the first one whose allocations all come from the cache.
        """
        started = time.perf_counter()
        with torch.cuda.stream(stream), self.program.rehearsal():
            for _ in range(2):
                for part in self._parts.values():
                    part(0)
                    if self.program.device.type == "cuda":
                        torch.cuda.synchronize(self.program.device)
        self.warm_up_s = time.perf_counter() - started

    def __call__(self, signature: str, slot: int) -> None:
        """Run one part on one input slot; asynchronous on a CUDA device."""
        self._parts[signature](slot)


def _compile_in_place(region: Region) -> None:
    eager: Callable[..., Any] = getattr(region.owner, region.name)
    setattr(region.owner, region.name, torch.compile(eager, dynamic=False))
