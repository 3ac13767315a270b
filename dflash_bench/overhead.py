"""What measuring costs: the same steps timed one by one and watched, and timed as a whole."""

import statistics
import time
from collections.abc import Callable

from dflash.measurement import Estimate
from dflash_bench.child import Child
from dflash_bench.statistics import LOOKS, compare_turns, is_enough
from dflash_bench.weather import Watch

PRECISION = 0.01
"""Relative to a step; pairs are taken until the interval is half as wide to either side."""

MAX_PAIRS = 24
LONGEST_S = 20.0
"""After which there are no more pairs than an interval takes."""

LONGEST_TURN_MS = 2000.0
"""In longer turns what measuring costs is lost, and finding that out takes minutes."""


def overhead_share(child: Child, watch: Watch, *, say: Callable[[str], None]) -> Estimate | None:
    """Return by what share measured steps take longer than bare ones, with a 99 % interval.

    None where the child has no bare turns or fails, or its turns are long.
    """
    if sum(child.turns[-1]) > LONGEST_TURN_MS or child.bare() is None:
        return None
    say("what measuring costs: turns with it and without")
    measured: list[list[float]] = []
    bare: list[list[float]] = []
    ends_at = time.monotonic() + LONGEST_S
    while True:
        for watched in (True, False) if len(measured) % 2 else (False, True):
            if watched:
                with watch.watching():
                    measured_ms = child.extra_turn()
            else:
                bare_ms = child.bare()
        if bare_ms is None or not measured_ms:
            return None
        bare.append([bare_ms])
        measured.append([statistics.fmean(measured_ms)])
        if len(measured) not in LOOKS:
            continue
        ratio, _ = compare_turns(measured, bare, precision=PRECISION)
        late = len(measured) >= MAX_PAIRS or time.monotonic() > ends_at
        if late or is_enough(ratio, precision=PRECISION):
            return Estimate(value=ratio.value - 1, low=ratio.low - 1, high=ratio.high - 1)
