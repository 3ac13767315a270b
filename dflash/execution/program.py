"""What one worker repeats on one device, as the execution modes see it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """A function held by attribute ``name`` of ``owner`` that a compiling mode may replace.

    It takes tensors of one static shape per signature and contains no host synchronisation. A
    ``kernel`` is compiled on a CUDA device in every mode, also in eager: what it computes has no
    other form that is worth running there (an attention, an optimizer's pass). A ``dynamic`` region
    is called with tensors of many lengths, which one kernel serves. ``constants`` are tensors it is
    called with that never move, beside parameters: a graph reads them where they are. ``backend``
    is torch.compile's: what the code is made by; torch captures graphs of "inductor" only.
    """

    owner: object
    name: str
    kernel: bool = False
    dynamic: bool = False
    constants: tuple[Tensor, ...] = ()
    backend: str | Callable[..., Any] = "inductor"


class Program(Protocol):
    """Parts that read and write static buffers, and the orders in which they follow each other.

    ``inputs`` are buffers, allocated once, that the parts read. ``rounds`` names the orders:
    ``(("normal", "update"), ("metric", "update"))``; a runner runs no part outside of them, but
    may repeat one that follows itself. ``rehearsal`` is a context in which parts may be called
    without leaving a trace in weights, optimizer state or measurements. ``probe`` is a float64
    vector on the device: sums over what the rounds of a rehearsal have left so far (loss, weight,
    gradient norm), by which two ways of running them are compared.

    ``carried`` are the tensors that a part leaves for the next one without a buffer of their own:
    gradients, None where there is none. A captured part runs no Python, so ``carry`` is told what
    its graph has left instead.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> Mapping[str, Tensor]: ...

    @property
    def parts(self) -> Mapping[str, Callable[[], None]]: ...

    @property
    def rounds(self) -> Sequence[Sequence[str]]: ...

    def regions(self) -> Iterable[Region]: ...

    def rehearsal(self) -> AbstractContextManager[None]: ...

    def probe(self) -> Tensor: ...

    def carried(self) -> Sequence[Tensor | None]: ...

    def carry(self, tensors: Sequence[Tensor | None]) -> None: ...
