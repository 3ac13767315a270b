"""Clocks: milliseconds of steps, and a matrix product's rate."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

MATRIX_SIZE = 8192

TURN_S = 4.0
"""Longer turns are cut: what takes turns should do so often."""

LEAST_STEPS = 2


def steps_that_fit(most: int, step_s: float) -> int:
    """Steps of *step_s* seconds in a turn: as many as fit, two at least, *most* at most."""
    return min(most, max(LEAST_STEPS, round(TURN_S / step_s)))


def time_steps(run: Callable[[int], object], count: int, device: torch.device) -> list[float]:
    """Return milliseconds of *count* calls: by events on a GPU, by the clock on a CPU."""
    if device.type == "cpu":
        times = []
        for number in range(count):
            started = time.perf_counter()
            run(number)
            times.append((time.perf_counter() - started) * 1e3)
        return times
    with torch.cuda.device(device):  # else events are another GPU's, and time nothing
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for number in range(count):
            run(number)
            marks[number + 1].record()
        marks[-1].synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]


class MatrixProduct:
    """A subject: a bf16 product of two random square matrices on a GPU, the yardstick of steps."""

    REPEATS = 10
    LEAD_IN = 3

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def build(self) -> dict[str, Any]:
        shape = (MATRIX_SIZE, MATRIX_SIZE)
        self._left, self._right, self._out = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3)
        )
        return {}

    def prepare(self) -> dict[str, Any]:
        self.turn()
        return {}

    def turn(self) -> list[float]:
        times = time_steps(
            lambda _: torch.mm(self._left, self._right, out=self._out),
            self.LEAD_IN + self.REPEATS,
            self.device,
        )
        return times[self.LEAD_IN :]

    def finish(self) -> dict[str, Any]:
        return {}


def matrix_tflops(turns: Sequence[Sequence[float]]) -> float:
    """TFLOP/s of the median product over all turns."""
    times_ms = [time_ms for turn in turns for time_ms in turn]
    return 2 * MATRIX_SIZE**3 / (statistics.median(times_ms) * 1e-3) / 1e12
