"""A user's own step in the place of a failure mode's, inside a child.

``--step mypackage.mymodule:make_step`` names a function: ``make_step(device)`` returns a callable
and a tuple of its inputs.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

CALLS = 2


def program_with_step(words: argparse.Namespace) -> Callable[[], float]:
    """What the child runs: the mode around the step, or, as "own", the step alone."""
    from dflash.diagnose.child import find_mode

    if words.variant == "own":
        return lambda: run_alone(words.step)
    mode, make_step = find_mode(words.address), load_step(words.step)
    return lambda: float(
        mode.reproduce_step(make_step, faulty=words.variant == "faulty", seed=words.seed)
    )


def load_step(name: str) -> Callable[..., Any]:
    """Import ``module:function``."""
    module, _, function = name.partition(":")
    made: Callable[..., Any] = getattr(import_module(module), function)
    return made


def run_alone(name: str) -> float:
    """Call the step twice in the main thread of a fresh process; what it raises is its own."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, inputs = load_step(name)(device)
    for _ in range(CALLS):
        step(*inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 0.0
