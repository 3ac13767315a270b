"""Failure modes, from what applies here to their findings."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from dflash.diagnose.expected import Expectation, expectation
from dflash.diagnose.findings import Finding, Launch, Part, Variant
from dflash.diagnose.judge import Judgement, is_quiet, judge, severity, shows
from dflash.diagnose.launch import Order, run_jobs
from dflash.diagnose.machine import GPUS_NEEDED, Applies, Machine, applies
from dflash.diagnose.room import room_of
from dflash.failures import FailureMode, page_of

Level = Literal["quick", "standard", "deep"]
CPU_LAUNCHES: dict[Level, int] = {"quick": 5, "standard": 20, "deep": 300}
GPU_LAUNCHES: dict[Level, int] = {"quick": 2, "standard": 5, "deep": 20}
KEPT_IN_FULL = 2
"""Launches of each variant and kind of end whose stacks, output and marks go into the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to launch. ``trials`` overrides the level, ``time_limit_s`` the page.

    A ``time_limit_s`` below the page's ends launches early; that they hang it cannot show.
    """

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


class Examination:
    """One failure mode: the launches to make, and what they came to."""

    def __init__(self, mode: FailureMode, machine: Machine, *, plan: Plan) -> None:
        self.mode, self.plan = mode, plan
        self.expected = expectation(mode, machine.torch, num_gpus=machine.num_gpus)
        self.fit = applies(mode, machine)
        if plan.step and self.fit.part == "cpu":
            self.fit = Applies(None, "with a step of yours it needs a CUDA GPU, here is none")
        self._launches: list[Launch] = []
        self._num_wanted: int | None = None if self.fit.part else 0
        self._begun_s = self._ended_s = 0.0

    def rounds(self) -> Iterator[list[Order]]:
        """The faulty program and the control; then the sound one, once if there was no failure.

        Each is asked for when the launches of the one before were added.
        """
        if self.fit.part is not None:
            num = self.plan.launches(self.mode, self.fit.part)
            has_control = self.mode.control is not None and self._is_whole and not self.plan.step
            yield [*self._orders("control", int(has_control)), *self._orders("faulty", num)]
            faulty = [launch for launch in self._launches if launch.variant == "faulty"]
            failed = any(shows(self.mode, launch) for launch in faulty)
            sound = self._orders("sound", num if failed else 1)
            self._num_wanted = len(self._launches) + len(sound)
            yield sound

    @property
    def is_over(self) -> bool:
        """Whether every launch was made."""
        return len(self._launches) == self._num_wanted

    def add(self, launch: Launch) -> None:
        """Take the launch that has just ended."""
        self._ended_s = time.monotonic()
        if not self._launches:
            self._begun_s = self._ended_s - launch.wall_s
        self._launches.append(launch)

    def finding(self) -> Finding:
        """Judge what there is."""
        if self.fit.part is None:
            nothing = Judgement(
                "not applicable", self.fit.not_run, None, None, None, "not run", "nothing was run"
            )
            return _finding(self.mode, nothing, expected=self.expected, fit=self.fit)
        judgement = judge(self.mode, self._launches)
        found = _finding(
            self.mode, judgement, expected=self.expected, fit=self.fit, launches=self._launches
        )
        return found.model_copy(update={"wall_s": round(self._ended_s - self._begun_s, 3)})

    @property
    def _is_whole(self) -> bool:
        return self.fit.part == "whole"

    def _orders(self, variant: Variant, times: int) -> list[Order]:
        return [
            Order(
                address=address_of(self.mode),
                variant=variant,
                seed=seed,
                part=self.fit.part or "whole",
                time_limit_s=self.plan.time_limit_s or self.mode.time_limit_s,
                hang_s=self.mode.time_limit_s,
                step=self.plan.step,
                num_gpus=GPUS_NEEDED[self.mode.device] if self._is_whole else 0,
            )
            for seed in range(times)
        ]


def examine(
    modes: Sequence[FailureMode],
    machine: Machine,
    *,
    plan: Plan,
    watch: Callable[[str, Launch], None] = lambda _slug, _launch: None,
) -> list[Finding]:
    """Launch what the plan asks for, and judge; *watch* sees every launch as it ends.

    Launches go beside each other, those that use a GPU with that GPU to themselves. An interrupt
    ends all children at once; the modes that are done by then are judged.
    """
    examinations = [Examination(mode, machine, plan=plan) for mode in modes]
    running = run_jobs(
        [one.rounds() for one in examinations], room_of(machine.num_gpus, machine.num_cores)
    )
    with suppress(KeyboardInterrupt), closing(running):
        for number, launch in running:
            examinations[number].add(launch)
            watch(modes[number].slug, launch)
    return [one.finding() for one in examinations if one.is_over]


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
