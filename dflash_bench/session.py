"""A bench from its plan: every case at every shape, its modes taking turns in child processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dflash.measurement import Bench
from dflash_bench.cases._case import Lengths
from dflash_bench.shapes import BenchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What one call of ``dflash bench`` measures, and how long it may take.

    Attributes:
        cases, modes: by name; no *modes* means all that a case has and the machine can do.
        drafters: threads with a drafter each, of one process; on *devices* in turn.
        devices: GPUs to use, ("auto",) for the first GPU or the CPU.
        turn_steps: timed steps in a turn.
        precision: relative half width of a comparison at which no more turns are taken.
        max_time_s: of taking turns, for every case at every shape.
        min_pairs: turns of each mode that are taken in any case.
        limit_s: a child that is silent for longer hangs.
        require_gpu: no GPU is an error (exit code 3), where a row would be skipped.
        command: to repeat it.
    """

    cases: tuple[str, ...] = ("drafter-step",)
    shapes: tuple[BenchShape, ...] = ()
    modes: tuple[str, ...] = ()
    lengths: tuple[Lengths, ...] = ("fixed",)
    drafters: int = 1
    devices: tuple[str, ...] = ("auto",)
    matmul: Literal["bf16", "fp8"] = "bf16"
    seed: int = 0
    turn_steps: int = 25
    precision: float = 0.01
    max_time_s: float = 180.0
    min_pairs: int = 6
    limit_s: float = 300.0
    require_gpu: bool = False
    command: str = "dflash bench"


def run_bench(plan: BenchPlan, *, say: Callable[[str], None]) -> Bench:
    """Measure everything that *plan* asks for; talk goes to *say*.

    A mode that fails is a row. Ctrl-C ends the measuring, and what there is by then is returned
    with ``complete=False``.

    Raises:
        UsageError: an unknown case, mode or device.
        MissingError: ``require_gpu`` without a GPU.
    """
    raise NotImplementedError
