"""A subject that repeats one call in its main thread: for cases that are no training step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.execution import capture_watch
from dflash_bench.cases._case import Found, Setting
from dflash_bench.compile_clock import CompileClock
from dflash_bench.counters import Counters
from dflash_bench.timing import time_steps

Run = Callable[[int], object]


def nothing_more() -> Found:
    """Return nothing."""
    return {}


@dataclass(slots=True, kw_only=True)
class Work:
    """What is repeated.

    Attributes:
        make_ready: compiles, captures, and returns what makes the step of a number; nobody else
            uses the device meanwhile.
        device: where it runs.
        units: what the step of this number is worth.
        calls: of it in one reading of the clock, where one is too short for it.
        padded: varying lengths are padded to one shape.
        finish: what is to be told at the end.
    """

    make_ready: Callable[[], Run]
    device: torch.device
    units: Callable[[int], float]
    calls: int = 1
    padded: bool = False
    finish: Callable[[], Found] = field(default=nothing_more)


class Repeated:
    """The subject around some work; a timed step is one call, by the mean over a reading."""

    def __init__(self, setting: Setting, make: Callable[[Setting], Work]) -> None:
        self.setting = setting
        self._make = make
        self._number = 0
        self._timed: list[int] = []

    def build(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._compiling, self._capturing = CompileClock(), capture_watch()
        self.work = self._make(self.setting)
        self._wait()
        self._counters = Counters(self.work.device)
        return {
            "build_s": time.perf_counter() - started,
            "units": self.work.units(0) if self.setting.lengths == "fixed" else [],
            "padded": self.work.padded,
        }

    def prepare(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._run = self.work.make_ready()
        self._wait()
        warm = time.perf_counter()
        self._run(0)
        self._wait()
        first_ms = (time.perf_counter() - warm) * 1e3
        self._number = 1
        self._counters.begin()
        return {
            "warm_up_s": warm - started,
            "compile_s": self._compiling.seconds,
            "capture_s": self._capturing.seconds,
            "first_steps_ms": [first_ms],
        }

    def settle(self) -> list[float]:
        """Make the other untimed steps."""
        times_ms = self._readings(self.setting.settling_steps - 1)
        self._counters.read(self._number)
        return times_ms

    def turn(self) -> list[float]:
        lead_in = self.setting.lead_in_steps
        first = self._number + lead_in
        times_ms = self._readings(lead_in + self.setting.turn_steps)[lead_in:]
        self._timed += range(first, self._number)
        self._counters.read(self._number)
        return times_ms

    def restart(self) -> None:
        """Begin again with the batch of the first turn."""
        self._number = self.setting.settling_steps

    def so_far(self) -> Found:
        found: Found = {
            **self._counters.found(),
            "compile_s": self._compiling.seconds,
            "capture_s": self._capturing.seconds,
        }
        if self.setting.lengths == "variable":
            found["units"] = [self.work.units(number) for number in self._timed]
        return found

    def finish(self) -> dict[str, Any]:
        return {**self.so_far(), **self.work.finish()}

    def _readings(self, num: int) -> list[float]:
        """Milliseconds of a call in each of *num* readings."""
        times_ms = time_steps(self._reading, num, self.work.device)
        return [time_ms / self.work.calls for time_ms in times_ms]

    def _reading(self, _number: int) -> None:
        for _ in range(self.work.calls):
            self._run(self._number)
        self._number += 1

    def _wait(self) -> None:
        if self.work.device.type == "cuda":
            torch.cuda.synchronize(self.work.device)
