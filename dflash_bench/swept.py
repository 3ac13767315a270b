"""A shape with one of its sizes changed, as a run would change with it."""

import math
from collections.abc import Sequence
from typing import Literal

from dflash.data.packing import MIN_PIECE_TOKENS
from dflash.drafter.masks import TILE, num_anchors_for
from dflash.errors import UsageError
from dflash_bench.shapes import BenchShape

Over = Literal["token_budget", "num_anchors", "num_documents", "drafters"]

SLACK = 1e-9
"""Of a density, against rounding up to one tile more."""


def swept_shape(shape: BenchShape, over: Over, value: int) -> BenchShape:
    """Return *shape* with this *value*, under a name that says so.

    A larger token budget holds more documents of the same length, and anchors in the same density,
    as in a run; otherwise nothing else changes.
    """
    name = f"{shape.name}:{over}={value}"
    if over == "token_budget":
        length = shape.token_budget // shape.num_documents
        density = shape.num_anchors / shape.token_budget * (1 - SLACK)
        return shape.with_(
            name=name,
            token_budget=value,
            num_anchors=num_anchors_for(value, density, shape.drafter.block_size),
            num_documents=max(1, value // length),
        )
    if over == "num_anchors":
        return shape.with_(name=name, num_anchors=value)
    if over == "num_documents":
        return shape.with_(name=name, num_documents=value)
    return shape.with_(name=name)


def step_of(shape: BenchShape, over: Over) -> int:
    """What values of *over* must be multiples of."""
    if over == "token_budget":
        return TILE
    return TILE // math.gcd(shape.drafter.block_size, TILE) if over == "num_anchors" else 1


def check_values(shape: BenchShape, over: Over, values: Sequence[int]) -> None:
    """Refuse values that no batch of *shape* can have.

    Raises:
        UsageError: names them all, and the rule.
    """
    step = step_of(shape, over)
    wrong = [value for value in values if value < 1 or value % step]
    if wrong:
        listed = ", ".join(map(str, wrong))
        raise UsageError(
            f"{over} cannot be {listed} at shape {shape.name}: it comes in multiples of {step}",
            hint="attention works on whole tiles of 128 rows" if step > 1 else "",
        )
    most = shape.token_budget // MIN_PIECE_TOKENS
    if over == "num_documents" and max(values) > most:
        raise UsageError(
            f"num_documents cannot be {max(values)} at shape {shape.name}: {shape.token_budget}"
            f" tokens hold at most {most} documents of {MIN_PIECE_TOKENS}"
        )
