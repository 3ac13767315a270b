"""One failure mode, from what applies here to its finding."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from dflash.diagnose.expected import Expectation, expectation
from dflash.diagnose.findings import Finding, Launch, Part, Variant
from dflash.diagnose.judge import Judgement, is_quiet, judge, severity, shows
from dflash.diagnose.launch import Order, run_orders
from dflash.diagnose.machine import Applies, Machine, applies
from dflash.failures import FailureMode, page_of

Level = Literal["quick", "standard", "deep"]
CPU_LAUNCHES: dict[Level, int] = {"quick": 5, "standard": 20, "deep": 300}
GPU_LAUNCHES: dict[Level, int] = {"quick": 2, "standard": 5, "deep": 20}
MAX_WIDTH = 8
KEPT_IN_FULL = 2
"""Launches of each variant and kind of end whose stacks, output and marks go into the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to launch. ``trials`` overrides the level, ``time_limit_s`` the page."""

    level: Level = "standard"
    trials: int | None = None
    time_limit_s: float | None = None
    step: str = ""

    def launches(self, mode: FailureMode, part: Part) -> int:
        if self.trials is not None:
            return self.trials
        if not mode.chance:
            return 1
        on_gpu = part == "whole" and mode.device != "cpu"
        return (GPU_LAUNCHES if on_gpu else CPU_LAUNCHES)[self.level]


def examine(
    mode: FailureMode,
    machine: Machine,
    *,
    plan: Plan,
    watch: Callable[[Launch], None] = lambda _launch: None,
) -> Finding:
    """Launch what the plan asks for, and judge; *watch* sees every launch as it ends."""
    fit, begun_s = applies(mode, machine), time.monotonic()
    expected = expectation(mode, machine.torch, num_gpus=machine.num_gpus)
    if plan.step and fit.part == "cpu":
        fit = Applies(None, "with a step of yours it needs a CUDA GPU, here is none")
    if fit.part is None:
        nothing = Judgement(
            "not applicable", fit.not_run, None, None, None, "not run", "nothing was run"
        )
        return _finding(mode, nothing, expected=expected, fit=fit)
    launches: list[Launch] = []
    for orders in _rounds(mode, launches, plan=plan, part=fit.part):
        running = run_orders(orders, width=_width(mode, machine, part=fit.part))
        with closing(running):  # an interrupt in here ends the children at once
            for launch in running:
                launches.append(launch)
                watch(launch)
    found = _finding(mode, judge(mode, launches), expected=expected, fit=fit, launches=launches)
    return found.model_copy(update={"wall_s": round(time.monotonic() - begun_s, 3)})


def _rounds(
    mode: FailureMode, launches: Sequence[Launch], *, plan: Plan, part: Part
) -> Iterator[list[Order]]:
    """The faulty program and the control; then the sound one, once if there was no failure."""
    num = plan.launches(mode, part)

    def orders(variant: Variant, times: int) -> list[Order]:
        limit_s = plan.time_limit_s or mode.time_limit_s
        return [
            Order(
                address=address_of(mode),
                variant=variant,
                seed=seed,
                part=part,
                time_limit_s=limit_s,
                step=plan.step,
            )
            for seed in range(times)
        ]

    has_control = mode.control is not None and part == "whole" and not plan.step
    yield [*orders("control", int(has_control)), *orders("faulty", num)]
    failed = any(shows(mode, launch) for launch in launches if launch.variant == "faulty")
    yield orders("sound", num if failed else 1)


def _width(mode: FailureMode, machine: Machine, *, part: Part) -> int:
    """Launches beside each other; those on a GPU share it with nobody."""
    if mode.alone or (part == "whole" and mode.device != "cpu"):
        return 1
    return min(machine.num_cores, max(2, machine.num_cores // 2), MAX_WIDTH)


def _finding(
    mode: FailureMode,
    judgement: Judgement,
    *,
    expected: Expectation,
    fit: Applies,
    launches: Sequence[Launch] = (),
) -> Finding:
    faulty = [one.value for one in launches if one.variant == "faulty" and one.value is not None]
    sound = [one.value for one in launches if one.variant == "sound" and one.value is not None]
    return Finding(
        slug=mode.slug,
        title=page_of(mode).title,
        device=mode.device,
        expected=expected.expected,
        expected_why=expected.why,
        part=fit.part,
        not_run=fit.not_run,
        deterministic=not mode.chance,
        measures=mode.measures,
        unit=mode.unit,
        limit=mode.limit,
        worst=max(faulty, default=None),
        best=max(sound, default=None),
        remedy=remedy_name(mode),
        severity=severity(judgement, expected),
        launches=_kept(mode, launches),
        **judgement._asdict(),
    )


def remedy_name(mode: FailureMode) -> str:
    """The dotted name of the production code that prevents the failure."""
    return f"{mode.remedy.__module__}.{mode.remedy.__qualname__}"


def address_of(mode: FailureMode) -> str:
    """What a child finds *mode* by: its slug, or ``module:NAME`` if it is no page of ours."""
    module = sys.modules[mode.reproduce.__module__]
    names = [name for name, thing in vars(module).items() if thing is mode]
    ours = module.__name__ == f"dflash.failures.{mode.slug.replace('-', '_')}"
    return mode.slug if ours or not names else f"{module.__name__}:{names[0]}"


def _kept(mode: FailureMode, launches: Sequence[Launch]) -> list[Launch]:
    seen: dict[tuple[str, bool, bool], int] = {}
    kept = []
    for launch in launches:
        kind = (launch.variant, shows(mode, launch), is_quiet(mode, launch))
        seen[kind] = seen.get(kind, 0) + 1
        kept.append(launch if seen[kind] <= KEPT_IN_FULL else launch.brief())
    return kept
