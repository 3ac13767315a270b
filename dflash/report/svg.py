"""Line plots as SVG text: panels with labelled axes, lines, points with their values, a legend.

Not here: what is plotted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

# told apart by the colour-blind too, the first four best
COLOURS = ("#1f6fb2", "#c8501e", "#3a8a4d", "#7a4fa3", "#8f7a12", "#5a6b7d")
GREY = "#667"
WIDTH, PANEL_HEIGHT, TITLE_HEIGHT = 720, 250, 34
LEFT, RIGHT, TOP, BOTTOM = 68, 20, 18, 46
HALO = 'stroke="white" stroke-width="3" paint-order="stroke"'  # readable where it meets a line
LABEL_WIDTH = 34
NUM_TICKS = 5
NICE_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour; *marked* draws dots with their values, otherwise a line.

    *number* picks the colour; by default it is the series' place in its panel.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False
    number: int | None = None

    def drawable(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. The vertical one reaches down to *floor* and up to *ceiling*.

    The horizontal one encloses *across* too.
    """

    x_label: str
    y_label: str
    series: Sequence[Series]
    floor: float | None = None
    ceiling: float | None = None
    across: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """Data to pixels, linear."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose both ends."""
    if not high > low:
        low, high = low - 0.5, low + 0.5
    rough = (high - low) / NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * magnitude for nice in NICE_STEPS if nice * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def figure(title: str, panels: Sequence[Panel]) -> str:
    """A whole SVG document: *panels* below one another."""
    height = TITLE_HEIGHT + PANEL_HEIGHT * len(panels)
    body = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" role="img">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 22, title, size=15, bold=True),
    ]
    for number, panel in enumerate(panels):
        body += _panel(panel, top=TITLE_HEIGHT + PANEL_HEIGHT * number)
    return "\n".join([*body, "</svg>", ""])


def _panel(panel: Panel, *, top: int) -> Iterator[str]:
    points = [point for series in panel.series for point in series.drawable()]
    if not points:
        yield _text(LEFT, top + PANEL_HEIGHT / 2, f"{panel.y_label}: nothing recorded", fill=GREY)
        return
    xs, ys = [*panel.across, *(x for x, _ in points)], [y for _, y in points]
    x_ticks = ticks(min(xs), max(xs))
    ys += [end for end in (panel.floor, panel.ceiling) if end is not None]
    y_ticks = ticks(min(ys), max(ys))
    across = Axis(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    up = Axis(y_ticks[0], y_ticks[-1], top + PANEL_HEIGHT - BOTTOM, top + TOP)
    yield from _frame(panel, across, up, ticks_xy=(x_ticks, y_ticks))
    for number, series in enumerate(panel.series):
        yield from _draw(series, across, up, colour=_colour(series, number))
    yield from _legend(panel, top=top)


def _frame(
    panel: Panel, across: Axis, up: Axis, *, ticks_xy: tuple[list[float], list[float]]
) -> Iterator[str]:
    x_ticks, y_ticks = ticks_xy
    for value in y_ticks:
        yield _line((across.start, up(value)), (across.end, up(value)), "#dde")
        yield _text(across.start - 8, up(value) + 4, f"{value:g}", anchor="end", fill=GREY)
    for value in x_ticks:
        yield _line((across(value), up.start), (across(value), up.start + 4), GREY)
        yield _text(across(value), up.start + 17, f"{value:g}", anchor="middle", fill=GREY)
    yield _line((across.start, up.start), (across.end, up.start), GREY)
    yield _line((across.start, up.start), (across.start, up.end), GREY)
    middle = (across.start + across.end) / 2
    yield _text(middle, up.start + 35, panel.x_label, anchor="middle")
    x, y = 18, (up.start + up.end) / 2
    label = _text(x, y, panel.y_label, anchor="middle")
    yield label.replace("<text ", f'<text transform="rotate(-90 {x} {y})" ', 1)


def _draw(series: Series, across: Axis, up: Axis, *, colour: str) -> Iterator[str]:
    places = [(across(x), up(y), y) for x, y in sorted(series.drawable())]
    path = " ".join(f"{x},{y}" for x, y, _ in places)
    dashes = ' stroke-dasharray="3 4"' if series.marked else ""
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.7"{dashes}/>'
    if not series.marked:
        return
    pairs = pairwise(x for x, _, _ in places)
    near = {x for before, x in pairs if x - before < LABEL_WIDTH}
    for x, y, value in places:
        yield f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'
        if x not in near or (x, y, value) == places[-1]:
            label = _text(x, y - 9, f"{value:.2f}", anchor="middle", fill=colour, bold=True)
            yield label.replace("<text ", f"<text {HALO} ", 1)


def _colour(series: Series, place: int) -> str:
    return COLOURS[(place if series.number is None else series.number) % len(COLOURS)]


def _legend(panel: Panel, *, top: int) -> Iterator[str]:
    x = float(LEFT + 8)
    for number, series in enumerate(panel.series):
        colour = _colour(series, number)
        yield f'<rect x="{x}" y="{top + 2}" width="11" height="11" fill="{colour}"/>'
        yield _text(x + 16, top + 12, series.name)
        x += 40 + 6.6 * len(series.name)


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = "#223",
    size: int = 12,
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{weight}>'
        f"{escape(text)}</text>"
    )
