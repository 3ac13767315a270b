"""Bars as HTML that keeps its letters' size in a narrow window: name, bar with interval, value.

Not here: what is drawn, and the colours ``--c0``, ``--c1`` .. and classes, which the page defines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

HEIGHT = 22
MIDDLE = HEIGHT / 2
CAP = 4  # half the height of an interval's ends


@dataclass(frozen=True, slots=True)
class Bar:
    """One line; without a value only what is said *instead* of it.

    Attributes:
        number: of its colour.
        value: length of the bar; *behind* is a longer, paler one under it.
        low, high: ends of the interval, if it has one.
        tick: a mark across the bar, for what was predicted.
        text: beside the bar; HTML, as *instead* is.
    """

    name: str
    number: int
    value: float | None = None
    behind: float | None = None
    low: float | None = None
    high: float | None = None
    tick: float | None = None
    text: str = ""
    instead: str = ""


def bars(items: Sequence[Bar], *, top: float) -> str:
    """All *items* on one scale, from nought to *top*."""
    lines = ['<div class="bars">']
    for item in items:
        name = f'<span class="name">{escape(item.name)}</span>'
        if item.value is None:
            lines.append(
                f'<div class="bar">{name}<span class="instead">{item.instead}</span></div>'
            )
            continue
        drawn = "".join(_drawn(item, top or 1.0))
        lines.append(
            f'<div class="bar">{name}<svg class="track" width="100%" height="{HEIGHT}"'
            f' aria-hidden="true">{drawn}</svg><span class="value">{item.text}</span></div>'
        )
    return "\n".join([*lines, "</div>"])


def reach(items: Sequence[Bar]) -> float:
    """The largest figure of *items*: a scale that holds them all."""
    return max(
        (
            figure
            for item in items
            for figure in (item.value, item.behind, item.high, item.tick)
            if figure is not None
        ),
        default=0.0,
    )


def _drawn(item: Bar, top: float) -> Iterator[str]:
    def at(value: float) -> str:
        return f"{100 * value / top:.3f}%"

    fill = f'style="fill:var(--c{item.number})"'
    if item.behind is not None:
        yield f'<rect class="behind" y="3" height="16" width="{at(item.behind)}" {fill}/>'
    if item.value is not None:
        yield f'<rect y="3" height="16" width="{at(item.value)}" {fill}/>'
    if item.low is not None and item.high is not None:
        low, high = at(item.low), at(item.high)
        yield f'<line class="interval" x1="{low}" x2="{high}" y1="{MIDDLE}" y2="{MIDDLE}"/>'
        for end in (low, high):
            yield (
                f'<line class="interval" x1="{end}" x2="{end}" y1="{MIDDLE - CAP}"'
                f' y2="{MIDDLE + CAP}"/>'
            )
    if item.tick is not None:
        yield f'<line class="tick" x1="{at(item.tick)}" x2="{at(item.tick)}" y1="0" y2="{HEIGHT}"/>'
