"""From how a process ended to the failure mode that ``dflash explain`` knows it by.

The pages themselves say what they look like (``FailureMode.detect``); what is added here is what
they cannot see in a finished run: an allocator's own figures in the message of its last error.
"""

import re

from dflash.diagnose.finished import FinishedRun
from dflash.failures import all_modes
from dflash_bench.subjects import Failure

UNITS = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "bytes": 2**-30}
_OUT_OF_MEMORY = re.compile(
    r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch.*?"
    r"([\d.]+) (\w+) is reserved by PyTorch but unallocated",
    re.DOTALL,
)


def slug_of(failure: Failure) -> str:
    """Return the slug of the first failure mode that knows *failure* as its own, or ""."""
    text = f"{failure.type}: {failure.message}\n{failure.trace}"
    run = FinishedRun(text=text)
    for mode in all_modes():
        if mode.detect is not None and next(iter(mode.detect(run)), None) is not None:
            return mode.slug
    return "allocator-churn" if _mostly_unused(text) else ""


def _mostly_unused(text: str) -> bool:
    """Whether memory ran out with more of it reserved than in use."""
    found = _OUT_OF_MEMORY.search(text)
    if found is None:
        return False
    used, used_unit, unused, unused_unit = found.groups()
    return float(unused) * UNITS.get(unused_unit, 0) > float(used) * UNITS.get(used_unit, 0)
