"""What is measured: one file a case, all of one shape.

Names are known without importing a case, and with it torch, so that a mistake is told at once.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_bench.cases._case import Case

EXECUTION_MODES = ("eager", "compiled", "reduce-overhead", "warmed", "graphed")
MODES = {
    "drafter-step": EXECUTION_MODES,
    "target-forward": ("whole-dense", "whole-packed", "stopped-dense", "stopped-packed"),
    "pipeline": EXECUTION_MODES,
    "decode": ("plain", "eager", "captured"),
    "mask": ("launched", "compiled", "captured", "captured-compiled"),
    "objective": ("full-logits", "full-compiled", "chunked", "chunked-compiled"),
    "packing": ("in-order", "best-fit"),
}
"""Of every case, the default baseline first. The first case is what ``dflash bench`` measures by
itself; a case's module has its name."""


@cache
def all_cases() -> "dict[str, Case]":
    """Every case by its name."""
    modules = (importlib.import_module(f"{__name__}.{name.replace('-', '_')}") for name in MODES)
    return {module.CASE.name: module.CASE for module in modules}
