"""What measuring costs: the same steps timed one by one and watched, and timed as a whole."""

import math
import statistics

from dflash_bench.turns import Child
from dflash_bench.weather import Watch

PAIRS = 6
T_QUANTILE = 2.571
"""Student's, of 5 degrees of freedom, for a 95 % interval of the mean of ``PAIRS``."""

LARGEST_ERROR = 0.02
"""Of a step; where turns differ more by themselves, nothing can be said of what measuring adds."""


def overhead_share(child: Child, watch: Watch) -> float | None:
    """Return by how much measured steps take longer than bare ones; noise may make it negative.

    None where the child has no bare turns or fails, or where noise hides the answer.
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
    error = T_QUANTILE * statistics.stdev(logs) / math.sqrt(PAIRS)
    return None if error > LARGEST_ERROR else math.expm1(statistics.fmean(logs))
