"""The shape that every failure mode has."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

HEADINGS = ("Symptom", "Mechanism", "Reproduce", "Remedy", "Verify", "Versions", "Sources")

Device = Literal["cpu", "gpu", "two gpus"]
WITH_GPU = " with a GPU"
"""Ends a key of ``affected``: "2.11 with a GPU" goes before "2.11" where torch sees a GPU."""

Death = Literal["signal", "hang", "cuda error", "out of memory", "exception"]
"""How a child can end other than by returning its number: a signal that nobody sent (SIGSEGV,
SIGABRT), silence beyond its time limit, an exception of CUDA's, of memory, or any other, in any
thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """One way training goes wrong, as something that can be run.

    ``reproduce(faulty=True)`` measures more than ``limit`` or dies in one of ``deaths`` where the
    installed torch has the failure; ``reproduce(faulty=False)``, the same code with the fault taken
    out, does neither on any torch. ``remedy`` is the production object that prevents it: a real
    import, so renaming or deleting the remedy breaks this file.

    Attributes:
        slug: its name on the command line.
        measures: what the number is, in words; unit: of it.
        limit: above it the failure has shown itself.
        reproduce: ``(*, faulty: bool, seed: int = 0) -> float``; where ``child`` is set it may end
            the process, leave threads hanging or poison torch.
        remedy: production code.
        device: what it takes to show the whole failure.
        part_on_cpu: ``(*, faulty: bool, seed: int = 0) -> float``, of the same measure and limit:
            what a machine without a GPU can show of it.
        child: run in a child process only. A mode that is exact arithmetic need not.
        deaths: ends that are this failure; any other end of a child is no verdict.
        chance: whether it takes luck to see; without, one launch decides.
        affected: torch's minor version, "2.11", to whether it has the failure. A version that is
            not listed is not known. Empty: the failure is in the program, not in torch.
        reproduce_step: ``(make_step, *, faulty: bool, seed: int = 0) -> float``: the same with a
            user's step; ``make_step(device)`` returns a callable and a tuple of its inputs.
        detect: the lines of a finished run that show that it suffered from this; none where it did
            not.
        time_limit_s: of one launch, after which it counts as a hang.
        control: ``(*, seed: int = 0) -> float``: a program that must show the failure on any torch
            of the device, where there is one; without it firing, "not reproduced" says nothing.
    """

    slug: str
    measures: str
    unit: str
    limit: float
    reproduce: Callable[..., float]
    remedy: Callable[..., Any]
    device: Device = "cpu"
    part_on_cpu: Callable[..., float] | None = None
    child: bool = False
    deaths: frozenset[Death] = frozenset()
    chance: bool = False
    affected: Mapping[str, bool] = field(default_factory=dict)
    time_limit_s: float = 60.0
    control: Callable[..., float] | None = None
    reproduce_step: Callable[..., float] | None = None
    detect: Callable[["FinishedRun"], Iterable[str]] | None = None
