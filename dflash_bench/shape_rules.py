"""What the numbers of a shape must be: one check of shape files, ``--set``, configs and scaling.

Without torch, so that a mistake is told at once.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.config.sections import TILE
from dflash.data.packing import MIN_PIECE_TOKENS

SIZES = ("token_budget", "num_anchors", "num_documents")
"""Of a batch."""

MOST_DRAFTERS = 64

ABOVE_ZERO = ("rope_theta", "rms_norm_eps")


def step_of(size: str, *, block_size: int) -> int:
    """What values of *size* must be multiples of."""
    if size == "token_budget":
        return TILE
    return TILE // math.gcd(block_size, TILE) if size == "num_anchors" else 1


def broken_rule(size: str, value: int, *, token_budget: int, block_size: int) -> str:
    """The rule that *value* breaks, "" where a batch can have so many of *size*."""
    step = step_of(size, block_size=block_size)
    if value < 1 or value % step:
        return f"it comes in multiples of {step}"
    if size == "num_anchors" and value > token_budget:
        return f"{token_budget} tokens have at most as many anchors"
    if size == "drafters" and value > MOST_DRAFTERS:
        return f"at most {MOST_DRAFTERS} threads train beside each other"
    most = token_budget // MIN_PIECE_TOKENS
    if size == "num_documents" and value > most:
        return f"{token_budget} tokens hold at most {most} documents of {MIN_PIECE_TOKENS}"
    return ""


def broken_sizes(sizes: Mapping[str, int], *, block_size: int) -> Iterator[str]:
    """A sentence for each of *sizes* that no batch can have; "token_budget" is one of them."""
    for size, value in sizes.items():
        budget = sizes["token_budget"]
        if rule := broken_rule(size, value, token_budget=budget, block_size=block_size):
            yield f"{size} cannot be {value}: {rule}"


def problems_of(
    sizes: Mapping[str, int], *, block_size: int, parts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Every rule that a shape of these *sizes* and *parts* breaks, a sentence each."""
    found = list(broken_sizes(sizes, block_size=block_size))
    for part, numbers in parts.items():
        found += broken_numbers(part, numbers)
    return found


def broken_numbers(part: str, numbers: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each of *numbers*, of a *part* of a shape, that is nan, infinite or no
    positive one where it must be."""
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            yield f"{part}.{name} cannot be {value}: it is a finite number"
        elif name in ABOVE_ZERO and value <= 0:
            yield f"{part}.{name} cannot be {value}: it is above 0"
