"""Step times as strips: every step a dot, in its order, above or below the median of its mode.

Strips that are drawn together have one scale, so their unrest can be compared. A step beyond it is
a dot on its edge, in another colour. Untimed first steps stand before the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

COLUMNS, ROWS = 800, 100
UNTIMED_COLUMNS = 60
SCALES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MANY_TURNS = 60


@dataclass(frozen=True, slots=True)
class Strip:
    """One mode: milliseconds of its untimed steps, of its timed ones a turn, and their median."""

    name: str
    number: int
    first_ms: Sequence[float]
    turns_ms: Sequence[Sequence[float]]
    median_ms: float
    text: str = ""


def scale_of(unrest: float) -> float:
    """How far a strip reaches up and down of its median, as a share of it.

    Args:
        unrest: largest distance of a 10th or 90th percentile from its median, as a share.
    """
    return next((scale for scale in SCALES if scale >= 2 * unrest), SCALES[-1])


def strips(items: Sequence[Strip], *, scale: float) -> str:
    """All *items*, below one another, as HTML."""
    return "\n".join(['<div class="strips">', *(_strip(item, scale) for item in items), "</div>"])


def _strip(item: Strip, scale: float) -> str:
    def row(value_ms: float) -> int:
        above = (value_ms / item.median_ms - 1) / scale
        return round(ROWS / 2 * (1 - min(max(above, -1), 1)))

    timed = [value for turn in item.turns_ms for value in turn]
    wide = max(len(timed) - 1, 1)
    dots = {
        (UNTIMED_COLUMNS + 10 + round((COLUMNS - UNTIMED_COLUMNS - 20) * at / wide), row(value))
        for at, value in enumerate(timed)
    }
    first = {
        (10 + round((UNTIMED_COLUMNS - 20) * at / max(len(item.first_ms) - 1, 1)), row(value))
        for at, value in enumerate(item.first_ms)
    }
    inside = {dot for dot in dots if 0 < dot[1] < ROWS}
    drawn = [
        *_frame(item, wide),
        _dots(first, "untimed"),
        _dots(inside, "timed", f' style="stroke:var(--c{item.number})"'),
        _dots(dots - inside, "beyond"),
    ]
    percent = f"{scale:.0%}"
    return (
        f'<div class="strip"><div class="above"><span class="name">{escape(item.name)}</span>'
        f'<span class="value">{item.text}</span></div>'
        f'<div class="plot"><svg viewBox="0 0 {COLUMNS} {ROWS}" preserveAspectRatio="none"'
        f' role="img"><title>{escape(item.name)}: {len(timed)} timed steps</title>'
        f'{"".join(drawn)}</svg><span class="high">+{percent}</span>'
        f'<span class="low">-{percent}</span></div></div>'
    )


def _frame(item: Strip, wide: int) -> Iterator[str]:
    yield f'<rect class="before" width="{UNTIMED_COLUMNS}" height="{ROWS}"/>'
    starts = [0, *accumulate(len(turn) for turn in item.turns_ms)]
    if len(starts) <= MANY_TURNS:
        for number, (start, end) in enumerate(pairwise(starts)):
            if number % 2:
                left, right = (
                    UNTIMED_COLUMNS + 10 + (COLUMNS - UNTIMED_COLUMNS - 20) * at / wide
                    for at in (start - 0.5, end - 0.5)
                )
                yield (
                    f'<rect class="turn" x="{left:.1f}" width="{right - left:.1f}"'
                    f' height="{ROWS}"/>'
                )
    yield f'<path class="middle" d="M0,{ROWS // 2}H{COLUMNS}"/>'


def _dots(dots: set[tuple[int, int]], kind: str, style: str = "") -> str:
    path = "".join(f"M{x},{y}h0" for x, y in sorted(dots))
    return f'<path class="{kind}"{style} d="{path}"/>' if dots else ""
