"""One optimizer step of the drafter on given features, in every execution mode.

With lengths that vary, modes that take any shape get batches as long as they are, as a naive
program feeds them; ``warmed`` and ``graphed`` get them padded to T. N stays the shape's.
"""

import statistics
import time
from typing import Any

import torch

from dflash.errors import ConfigError
from dflash.execution import CAPTURING, SEALABLE, Mode, capture_watch, choose_mode
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting
from dflash_bench.compile_clock import CompileClock
from dflash_bench.counters import Counters
from dflash_bench.drafters import PADDED, Drafters, is_naive, lengths_of
from dflash_bench.flop import step_flop
from dflash_bench.kernels import profile_steps
from dflash_bench.planned import drafter_step_gib
from dflash_bench.timing import steps_that_fit

METRIC_STEPS = 5
"""Fewer where a turn has fewer."""

PROFILED_STEPS = 3


class DrafterStep:
    """A subject: warm-up in this thread, every step in a drafter's, as in a run.

    Every mode makes the same steps in the same order, so that losses can be compared.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        num = len(lengths_of(setting))
        self.settling, self.turn_steps = (
            -(-steps // num) * num  # every length as often as any other
            for steps in (setting.settling_steps, setting.turn_steps)
        )
        self.loss: float | None = None
        self._num_timed = 0

    def build(self) -> dict[str, Any]:
        """Make weights and inputs."""
        started = time.perf_counter()
        self.compiling, self.capturing = CompileClock(), capture_watch()
        self.counters = Counters(torch.device(self.setting.devices[0]))
        self.drafters = Drafters(self.setting)
        return {
            "build_s": time.perf_counter() - started,
            "units": self.drafters.units([0])[0] if self.setting.lengths == "fixed" else [],
            "padded": self.setting.lengths == "variable" and self.setting.mode in PADDED,
        }

    def prepare(self) -> dict[str, Any]:
        """Warm up, and make the first step."""
        warm_up_s = self.drafters.warm_up()
        times_ms = self.drafters.steps(1)
        self.counters.begin()
        return {
            "warm_up_s": warm_up_s,
            "compile_s": self.compiling.seconds,
            "capture_s": self.capturing.seconds,
            "first_steps_ms": times_ms,
        }

    def settle(self) -> list[float]:
        """Make the other untimed steps; with them the loss is known."""
        times_ms = self.drafters.steps(self.settling - 1)
        self.loss = self.drafters.loss()
        if times_ms and self.setting.devices[0] == "cpu":  # of a GPU it was known beforehand
            self._cut_turns(statistics.median(times_ms) * 1e-3)
        self.counters.read(self._made)
        return times_ms

    def _cut_turns(self, step_s: float) -> None:
        """Make a turn's steps fewer where they are long; whole rounds of the lengths."""
        fitting = steps_that_fit(self.turn_steps, step_s)
        num = len(lengths_of(self.setting))
        self.turn_steps = max(num, fitting // num * num)

    def turn(self) -> list[float]:
        """Time some steps, each by itself."""
        times_ms = self.drafters.steps(self.turn_steps, lead_in=self.setting.lead_in_steps)
        self.counters.read(self._made)
        self._num_timed += len(times_ms)
        return times_ms

    def bare(self) -> float:
        """Time as many steps by the clock before the first and after the last."""
        return self.drafters.steps(self.turn_steps, lead_in=self.setting.lead_in_steps, bare=True)[
            0
        ]

    def so_far(self) -> Found:
        """Read every counter."""
        found: Found = {
            **self.counters.found(),
            "compile_s": self.compiling.seconds,
            "capture_s": self.capturing.seconds,
            "loss_steps": self.settling,
        }
        if self.loss is not None:
            found["loss"] = self.loss
        if self.setting.lengths == "variable":
            timed = range(self.settling, self.settling + self._num_timed)
            found["units"] = self.drafters.units(timed)
        return found

    def finish(self) -> dict[str, Any]:
        """Read every counter, and only then do what would change them."""
        found, more = self.so_far(), dict[str, object]()
        if not is_naive(self.setting) and self.setting.mode in SEALABLE:
            num, lead_in = min(METRIC_STEPS, self.turn_steps), self.setting.lead_in_steps
            times_ms = self.drafters.steps(num, lead_in=lead_in, part="metric")
            more["metric ms"] = statistics.median(times_ms)
        if self.setting.profile:
            seen = profile_steps(
                self.drafters.steps,
                count=PROFILED_STEPS,
                device=torch.device(self.setting.devices[0]),
            )
            more["profile"] = {
                "groups_ms": seen.groups_ms,
                "gaps_ms": seen.gaps_ms,
                "text": seen.text(),
            }
        return {**found, "more": more}

    @property
    def _made(self) -> int:
        return self.drafters.first.steps_made


def why_not(setting: Setting) -> str:
    """Why a mode cannot be measured here, as a run would say it.

    ``reduce-overhead`` is measured in any case: that it dies is a result.
    """
    mode: Mode = setting.mode  # type: ignore[assignment]
    on_cpu = "cpu" in setting.devices
    if on_cpu and mode in CAPTURING:
        return "it captures CUDA graphs, and the drafter runs on the CPU"
    if on_cpu and setting.matmul != "bf16":
        return "8-bit products need a GPU of compute capability 8.9 or more"
    if mode == "reduce-overhead":
        return ""
    try:
        choose_mode(mode, setting.devices)
    except ConfigError as error:
        return error.what
    return ""


def flop(setting: Setting) -> float:
    """Of one step of all drafters."""
    return len(setting.devices) * step_flop(setting.shape).model


CASE = Case(
    name="drafter-step",
    help="one optimizer step of the drafter on given features",
    make=DrafterStep,
    modes=MODES["drafter-step"],
    why_not=why_not,
    flop=flop,
    planned_gib=drafter_step_gib,
)
