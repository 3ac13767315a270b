"""A shape with one of its sizes changed, as a run would change with it."""

from collections.abc import Sequence
from typing import Literal

from dflash.drafter.masks import TILE, num_anchors_for
from dflash.errors import UsageError
from dflash_bench.shape_rules import broken_rule, step_of
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


def check_values(shape: BenchShape, over: Over, values: Sequence[int]) -> None:
    """Refuse values that no batch of *shape* can have.

    Raises:
        UsageError: names them all, and the rule.
    """
    block_size = shape.drafter.block_size
    wrong: dict[str, list[int]] = {}
    for value in values:
        budget = value if over == "token_budget" else shape.token_budget
        if rule := broken_rule(over, value, token_budget=budget, block_size=block_size):
            wrong.setdefault(rule, []).append(value)
    if wrong:
        told = [
            f"{over} cannot be {', '.join(map(str, bad))} at shape {shape.name}: {rule}"
            for rule, bad in wrong.items()
        ]
        tiled = step_of(over, block_size=block_size) > 1
        raise UsageError(
            "; ".join(told),
            hint=f"attention works on whole tiles of {TILE} rows" if tiled else "",
        )
