"""The shape of a case: what one process measures, at one shape, in one mode.

A case is a module of this package with one ``CASE``. The session (``dflash_bench.session``) starts
a process for every mode, lets them take turns (``dflash_bench.turns``), and makes a
``dflash.measurement.Row`` of what each answered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from dflash.config.sections import Matmul
from dflash.measurement import Graphs, Memory
from dflash_bench.shapes import BenchShape
from dflash_bench.subjects import Subject

Lengths = Literal["fixed", "variable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a process must know; it is pickled.

    Attributes:
        mode: an execution mode, or one of the case's own variants.
        lengths: batches of exactly T tokens, or of lengths that vary from step to step.
        devices: of the drafters, one each; the first is the one that is timed.
        target_device: for cases that run a target.
        turn_steps: timed steps in a turn.
        lead_in_steps: untimed ones before them, when caches and clocks are those of whoever had the
            turn before.
        settling_steps: untimed ones before the first turn, the very first included; a capturing
            mode launches and captures every length in them. Whole rounds where lengths vary.
        matmul: as ``precision.matmul``.
        drafter: a run folder or checkpoint to decode with; random weights without.
        data: what the pipeline trains on, as ``data.train``, or one file of prompts to decode.
        profile: also find out which kernels the time goes to, after everything else.
    """

    shape: BenchShape
    mode: str
    lengths: Lengths = "fixed"
    devices: tuple[str, ...] = ("cpu",)
    target_device: str = "cpu"
    turn_steps: int = 10
    lead_in_steps: int = 2
    settling_steps: int = 8
    matmul: Matmul = "bf16"
    seed: int = 0
    drafter: str = ""
    data: tuple[str, ...] = ()
    profile: bool = False


class Found(TypedDict, total=False):
    """What a subject's ``build``, ``prepare``, ``so_far`` and ``finish`` answer, taken together.

    Attributes:
        build_s, warm_up_s, compile_s, capture_s: seconds, as in ``dflash.measurement.StartUp``.
        first_steps_ms: steps before the first timed one.
        units: what a timed step was worth (real tokens, for one), for every timed step in order;
            or one number for all.
        averaged: of how many units a timed step is the mean, for every one in order; one each where
            it is not told.
        memory, graphs: of this process.
        unsettled: what went on while steps were timed and should not have.
        loss: mean over the first ``loss_steps`` steps, the same steps in every mode.
        more: what only this case reports, JSON.
    """

    build_s: float
    warm_up_s: float
    compile_s: float
    capture_s: float
    first_steps_ms: list[float]
    units: list[float] | float
    averaged: list[float]
    padded: bool
    memory: Memory
    graphs: Graphs
    unsettled: str
    loss: float
    loss_steps: int
    more: dict[str, object]


def always(_setting: Setting) -> str:
    """Return "": nothing speaks against it."""
    return ""


def drafters_devices(setting: Setting) -> tuple[str, ...]:
    """Where the drafters are."""
    return setting.devices


def first_device(setting: Setting) -> tuple[str, ...]:
    """Where the first drafter is."""
    return setting.devices[:1]


def target_device(setting: Setting) -> tuple[str, ...]:
    """Where the target is."""
    return (setting.target_device,)


def nothing(_setting: Setting) -> tuple[str, ...]:
    """Return (): no files are read."""
    return ()


def unknown(_setting: Setting) -> None:
    """Return None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        name: as on the command line.
        help: one line.
        make: builds the subject in its process; a module's function, since it is pickled.
        modes: which it has, the default baseline first.
        unit: what it counts per second.
        devices: which it uses; the first is the one that is timed.
        require_files: finds out, in the process that starts the others, whether the files are there
            that a setting names and the case reads; raises what is wrong with them. Returns the
            names of what it reads of the setting.
        why_not: why a setting cannot be measured, "" if it can; asks no GPU.
        flop: floating-point operations of one step that a model's share of a matrix product counts.
        planned_gib: predicted peak of a process on the timed device, None where there is no plan.
    """

    name: str
    help: str
    make: Callable[[Setting], Subject]
    modes: tuple[str, ...]
    unit: str = "token"
    devices: Callable[[Setting], tuple[str, ...]] = drafters_devices
    require_files: Callable[[Setting], tuple[str, ...]] = nothing
    why_not: Callable[[Setting], str] = always
    flop: Callable[[Setting], float | None] = unknown
    planned_gib: Callable[[Setting], float | None] = unknown
