"""Clocks and figures: milliseconds of steps, what is said of them, a matrix product's rate."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

MATRIX_SIZE = 8192
SMALL_MATRIX_SIZE = 256  # on a CPU, where nobody compares with its rate


def time_steps(run: Callable[[int], object], count: int, device: torch.device) -> list[float]:
    """Return milliseconds of *count* calls: by events on a GPU, by the clock on a CPU."""
    if device.type == "cpu":
        times = []
        for number in range(count):
            started = time.perf_counter()
            run(number)
            times.append((time.perf_counter() - started) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for number in range(count):
        run(number)
        marks[number + 1].record()
    marks[-1].synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]


def step_figures(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, spread and extremes of two or more steps."""
    deciles = statistics.quantiles(times_ms, n=10)
    median = statistics.median(times_ms)
    return {
        "step_ms_median": median,
        "step_ms_p10": deciles[0],
        "step_ms_p90": deciles[-1],
        "step_ms_max": max(times_ms),
        "step_p90_over_median": deciles[-1] / median,
    }


def paired_ratio(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Median over turns of how many times as long *one*'s median step takes as *other*'s."""
    pairs = zip(one, other, strict=False)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


class MatrixProduct:
    """A subject: a bf16 product of two random square matrices, the yardstick of every step."""

    REPEATS = 10
    LEAD_IN = 3

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.size = MATRIX_SIZE if self.device.type == "cuda" else SMALL_MATRIX_SIZE

    def build(self) -> dict[str, Any]:
        shape = (self.size, self.size)
        self._left, self._right, self._out = (
            torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3)
        )
        return {"matrix_size": self.size}

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


def matrix_tflops(turns: Sequence[Sequence[float]], size: int) -> float:
    """TFLOP/s of the median product over all turns."""
    times_ms = [time_ms for turn in turns for time_ms in turn]
    return 2 * size**3 / (statistics.median(times_ms) * 1e-3) / 1e12
