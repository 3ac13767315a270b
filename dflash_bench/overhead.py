"""What measuring costs: the same steps timed one by one and watched, and timed as a whole."""

import math
import statistics

from dflash_bench.turns import Child
from dflash_bench.weather import Watch

PAIRS = 6


def overhead_share(child: Child, watch: Watch) -> float | None:
    """Return by how much measured steps take longer than bare ones; noise may make it negative.

    None where the child has no bare turns, or fails.
    """
    logs = []
    for number in range(PAIRS):
        bare_ms: float | None = None
        for measured in (True, False) if number % 2 else (False, True):
            if measured:
                with watch.watching():
                    child.turn()
            else:
                bare_ms = child.bare()
        if bare_ms is None or child.failure is not None:
            return None
        logs.append(math.log(statistics.fmean(child.turns[-1]) / bare_ms))
    return math.exp(statistics.median(logs)) - 1
