"""A bench from its plan: every case at every shape, its modes taking turns in child processes."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice, product
from typing import Any

import torch

from dflash.config.sections import Matmul
from dflash.environment import Environment, environment
from dflash.errors import DflashError, MissingError, UsageError
from dflash.measurement import Bench
from dflash_bench.cases._case import Case, Lengths, Setting
from dflash_bench.machine import commit
from dflash_bench.part import Limits, Part
from dflash_bench.selection import chosen_cases, chosen_modes
from dflash_bench.shapes import BenchShape
from dflash_bench.timing import steps_that_fit
from dflash_bench.weather import Watch

LONG_STEP_S = 0.5
"""One untimed step of this length is lead-in enough for a turn, and ``LONG_SETTLING_STEPS`` of them
before the first: one each that compiles, that captures, that replays, and one more."""

LONG_SETTLING_STEPS = 4

ASSUMED_FLOPS = 5e14
"""Of a GPU a second, to guess how long a step takes before there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What one call of ``dflash bench`` measures, and how long it may take.

    Attributes:
        cases, modes: by name; no *modes* means all that a case has and the machine can do.
        drafters: threads with a drafter each, of one process; on *devices* in turn.
        devices: to use, ("auto",) for all GPUs, or the CPU where there is none.
        target_device: of cases with a target; "auto" is the first drafter's.
        drafter, data, profile: as in ``Setting``.
        turn_steps: timed steps in a turn; fewer where a step is long.
        precision: relative half width of a comparison at which no more turns are taken.
        max_time_s: of taking turns, for every case at every shape; kinds of lengths share it.
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
    target_device: str = "auto"
    drafter: str = ""
    data: tuple[str, ...] = ()
    matmul: Matmul = "bf16"
    seed: int = 0
    profile: bool = False
    turn_steps: int = 10
    precision: float = 0.01
    max_time_s: float = 120.0
    min_pairs: int = 6
    limit_s: float = 300.0
    require_gpu: bool = False
    command: str = "dflash bench"


def run_bench(plan: BenchPlan, *more: BenchPlan, say: Callable[[str], None]) -> Bench:
    """Measure everything that *plan* asks for; talk goes to *say*.

    *more* plans are of other shapes or numbers of drafters. A mode that fails is a row. Ctrl-C ends
    the measuring, and what is known by then is returned with ``complete=False``; a second one ends
    it without asking what else is known.

    Raises:
        UsageError: an unknown case, mode or device, or a file that is not there.
        MissingError: ``require_gpu`` without a GPU.
    """
    started, began = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    plans = [plan, *more]
    devices = settled_devices(plan)
    cases = chosen_cases(plan.cases)
    chosen_modes(plan.modes, cases)
    _require_files(plan, cases, devices)
    here = environment()
    parts: list[Part] = []
    complete = True
    measured = _measured_on(plans, cases)
    with Watch(measured) as watch:
        try:
            for part in (
                each for one in plans for each in _parts(one, cases, watch=watch, say=say)
            ):
                parts.append(part)
                part.finds_overhead = all(one.overhead_share is None for one in parts)
                part.run()
        except KeyboardInterrupt:
            complete = False
            say("what was measured is kept")
        weather = watch.weather({number for part in parts for number in part.processes})
    return Bench(
        command=plan.command,
        date=began,
        commit=commit(),
        complete=complete,
        wall_s=round(time.monotonic() - started, 3),
        environment=here,
        device=_device_name(measured, here, watch),
        shapes={shape.name: shape.record() for one in plans for shape in one.shapes},
        options=_options(plan, devices),
        matrix_tflops=_median([part.matrix_tflops for part in parts]),
        overhead_share=next((part.overhead_share for part in parts if part.overhead_share), None),
        rows=[row for part in parts for row in part.rows()],
        comparisons=[one for part in parts for one in part.comparisons()],
        weather=weather,
    )


def settled_devices(plan: BenchPlan) -> tuple[str, ...]:
    """The device of every drafter; no CUDA context is made.

    Raises:
        UsageError: a device that is none, or is not here.
        MissingError: a GPU is required, and there is none.
    """
    num_gpus = torch.cuda.device_count()
    if plan.require_gpu and not num_gpus:
        raise MissingError(
            "--require-gpu: torch finds no usable GPU here",
            hint="dflash env says what is missing",
        )
    everything = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    wanted = list(plan.devices)
    if wanted == ["auto"]:
        wanted = everything
    known = list(dict.fromkeys(["cpu", *everything]))
    for name in _used(plan, tuple(wanted)):
        if name not in known:
            raise UsageError(f"there is no device {name!r}", hint=f"there is {', '.join(known)}")
    return tuple(islice(cycle(wanted), plan.drafters))


def setting_of(
    plan: BenchPlan, case: Case, *, shape: BenchShape, lengths: Lengths, devices: tuple[str, ...]
) -> Setting:
    """What every mode of a case is measured with, but for the mode."""
    setting = Setting(
        shape=shape,
        mode=case.modes[0],
        lengths=lengths,
        devices=devices,
        target_device=devices[0] if plan.target_device == "auto" else plan.target_device,
        turn_steps=plan.turn_steps,
        matmul=plan.matmul,
        seed=plan.seed,
        drafter=plan.drafter,
        data=plan.data,
        profile=plan.profile,
    )
    flop = case.flop(setting)
    used = set(case.devices(setting))
    if "cpu" in used or flop is None:
        return setting
    step_s = flop / len(used) / ASSUMED_FLOPS
    setting = replace(setting, turn_steps=steps_that_fit(plan.turn_steps, step_s))
    if step_s < LONG_STEP_S:
        return setting
    return replace(setting, lead_in_steps=1, settling_steps=LONG_SETTLING_STEPS)


def _parts(
    plan: BenchPlan, cases: tuple[Case, ...], *, watch: Watch, say: Callable[[str], None]
) -> Iterator[Part]:
    devices = settled_devices(plan)
    limits = Limits(
        precision=plan.precision,
        max_time_s=plan.max_time_s / len(plan.lengths),
        min_pairs=plan.min_pairs,
        limit_s=plan.limit_s,
    )
    for case in cases:
        modes = [mode for mode in case.modes if not plan.modes or mode in plan.modes]
        for shape in plan.shapes:
            for lengths in plan.lengths:
                one = setting_of(plan, case, shape=shape, lengths=lengths, devices=devices)
                settings = {mode: replace(one, mode=mode) for mode in modes}
                if settings:
                    watch.look_at(case.devices(one))
                    say(f"{case.name} at {shape.name}, {lengths} lengths")
                    yield Part(case=case, settings=settings, limits=limits, watch=watch, say=say)


def _require_files(plan: BenchPlan, cases: tuple[Case, ...], devices: tuple[str, ...]) -> None:
    """Refuse files that cannot be read, or that nothing reads, before a process is started.

    Raises:
        UsageError: with the case, or the option.
    """
    read: set[str] = set()
    for case in cases if plan.shapes else ():
        shape, lengths = plan.shapes[0], plan.lengths[0]
        try:
            setting = setting_of(plan, case, shape=shape, lengths=lengths, devices=devices)
            read.update(case.require_files(setting))
        except DflashError as error:
            raise UsageError(f"case {case.name}: {error.what}", hint=error.hint) from error
    for name in ("drafter", "data"):
        if getattr(plan, name) and name not in read:
            raise UsageError(
                f"--{name} is read by none of {', '.join(case.name for case in cases)} here",
                hint="decode reads --drafter, and with it --data; pipeline reads --data",
            )


def _used(plan: BenchPlan, devices: tuple[str, ...]) -> tuple[str, ...]:
    target = () if plan.target_device == "auto" else (plan.target_device,)
    return tuple(dict.fromkeys([*devices, *target]))


def _options(plan: BenchPlan, devices: tuple[str, ...]) -> dict[str, Any]:
    left_out = {"shapes", "command"}
    chosen = {name: value for name, value in asdict(plan).items() if name not in left_out}
    chosen = {k: list(v) if isinstance(v, tuple) else v for k, v in chosen.items()}
    return {**chosen, "devices": list(devices)}


def _measured_on(plans: Sequence[BenchPlan], cases: tuple[Case, ...]) -> tuple[str, ...]:
    """Where the cases run; what only others of the plans' devices do is nobody's weather."""
    found: dict[str, None] = {}
    for plan in plans:
        shapes, lengths, devices = plan.shapes[:1], plan.lengths[0], settled_devices(plan)
        for case, shape in product(cases, shapes):
            setting = setting_of(plan, case, shape=shape, lengths=lengths, devices=devices)
            found |= dict.fromkeys(case.devices(setting))
    return tuple(found) or settled_devices(plans[0])


def _device_name(measured: tuple[str, ...], here: Environment, watch: Watch) -> str:
    """Of the first GPU that is measured, else of the CPU."""
    gpus = [device for device in measured if device != "cpu"]
    if not gpus:
        return f"{platform.processor() or platform.machine()} CPU, {here.cpu_cores} cores"
    return watch.gpu_name(gpus[0]) or gpus[0]


def _median(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None
