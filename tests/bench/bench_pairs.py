"""Two made-up benches beside each other."""

import math
import random
from typing import Any

from bench_samples import measured, sample

from dflash.measurement import Bench, Change, Changes, Row, Spread
from dflash_bench.compare import compare_benches
from dflash_bench.expressions import parse_rule

MODES = ("eager", "compiled", "warmed", "graphed", "reduce-overhead")


def timed(mode: str, step_ms: float, *, noise: float = 0.001, seed: int = 0, **more: Any) -> Row:  # noqa: ANN401
    """A row of twelve turns around *step_ms*."""
    source = random.Random(seed)
    turns = [
        [step_ms * math.exp(offset + source.gauss(0, noise / 3)) for _ in range(10)]
        for offset in (source.gauss(0, noise) for _ in range(12))
    ]
    spread = Spread(median=step_ms, p10=step_ms, p90=step_ms, max=step_ms, count=120)
    return measured(mode, turns_ms=turns, step_ms=spread, **more)


def bench(*rows: Row, **changes: Any) -> Bench:  # noqa: ANN401
    update = {"rows": list(rows), "comparisons": [], "scaling": [], "weather": None}
    return sample().model_copy(update=update | changes)


def compared(before: Bench, after: Bench, *rules: str, **options: Any) -> Changes:  # noqa: ANN401
    parsed = [parse_rule(text, MODES) for text in rules]
    return compare_benches(before, after, rules=parsed, **options)


def change(found: Changes, figure: str = "step_ms") -> Change:
    return next(each for each in found.changes if each.figure == figure)
