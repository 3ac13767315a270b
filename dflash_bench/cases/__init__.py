"""What is measured: one file a case, all of one shape."""

import importlib
from functools import cache

from dflash_bench.cases._case import Case

MODULES = (
    "drafter_step",
    "target_forward",
    "pipeline",
    "decode",
    "mask",
    "objective",
    "packing",
)
"""In the order in which they are listed; the first is what ``dflash bench`` measures by itself."""


@cache
def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    cases = (importlib.import_module(f"{__name__}.{name}").CASE for name in MODULES)
    return {case.name: case for case in cases}
