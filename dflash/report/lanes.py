"""Marks of a launch as SVG: threads as lanes, time to the right, the moment of failure in red.

Not here: what was marked (``dflash.diagnose.timeline``).
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import shorten

from dflash.diagnose.findings import Launch, Mark
from dflash.report.svg import GREY, Axis, Panel, Series, figure, ticks

WIDTH, LANE, TOP, BOTTOM, LEFT, RIGHT = 720, 34, 30, 44, 150, 24
COLOURS = {
    "compile": "#7a4fa3",
    "capture": "#1f6fb2",
    "replay": "#3a8a4d",
    "cuda": "#8a7a2a",
    "note": "#667788",
    "fail": "#c8201e",
}
MIN_BAR = 3.0
MAX_NAME = 20
GIB = float(2**30)


def lanes(launch: Launch, *, title: str) -> str:
    """An SVG of the marks of *launch*; "" where it left none, or notes alone."""
    marks = [mark for mark in launch.marks if mark.kind in COLOURS]
    if all(mark.kind == "note" for mark in marks):
        return ""
    threads = list(dict.fromkeys(mark.thread for mark in sorted(marks, key=_begin)))
    scale = ticks(min(_begin(mark) for mark in marks), max(mark.at_s for mark in marks))
    across = Axis(scale[0], scale[-1], LEFT, WIDTH - RIGHT)
    height = TOP + LANE * len(threads) + BOTTOM
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        *_frame(threads, scale, across),
    ]
    for mark in sorted(marks, key=lambda mark: mark.kind == "fail"):
        body += _drawn(mark, across, top=TOP + LANE * threads.index(mark.thread))
    return "\n".join([*body, *_legend(marks, height - 8), "</svg>"])


def memory_curves(launches: Iterable[Launch], *, title: str) -> str:
    """Bytes over steps as marks of "memory" tell them, on one scale; "" where there are none.

    A series that several launches tell is drawn as the first one told it.
    """
    marks: list[Mark] = []
    for launch in launches:
        told = {mark.detail.get("series") for mark in marks}
        marks += [
            mark
            for mark in launch.marks
            if mark.kind == "memory" and mark.detail.get("series") not in told
        ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for mark in marks:
        series, step = str(mark.detail.get("series", "")), float(mark.detail.get("step", 0))
        for name, value in mark.detail.items():
            if name not in ("series", "step") and isinstance(value, int | float):
                curves.setdefault(f"{name}, {series}", []).append((step, value / GIB))
    series_list = [Series(name.strip(", "), points) for name, points in curves.items()]
    return figure(title, [Panel("step", "GiB", series_list, floor=0.0)]) if curves else ""


def _begin(mark: Mark) -> float:
    return mark.at_s - float(mark.detail.get("for_s", 0.0))


def _frame(threads: Sequence[str], scale: Sequence[float], across: Axis) -> Iterator[str]:
    bottom = TOP + LANE * len(threads)
    for value in scale:
        x = across(value)
        yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#dde"/>'
        yield f'<text x="{x}" y="{TOP - 8}" text-anchor="middle" fill="{GREY}">{value:g} s</text>'
    for number, thread in enumerate(threads):
        y = TOP + LANE * number + LANE / 2
        yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#dde"/>'
        name = escape(shorten(thread, MAX_NAME, placeholder=".."))
        yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end" fill="#223">{name}</text>'


def _drawn(mark: Mark, across: Axis, *, top: float) -> Iterator[str]:
    told = ", ".join(f"{name}={value}" for name, value in mark.detail.items())
    title = f"<title>{escape(f'{mark.kind} at {mark.at_s:.3f} s: {told}')}</title>"
    end, middle, colour = across(mark.at_s), top + LANE / 2, COLOURS[mark.kind]
    if mark.kind == "fail":
        cross = f"M{end - 6},{middle - 6} l12,12 m0,-12 l-12,12"
        yield f'<path d="{cross}" stroke="{colour}" stroke-width="3">{title}</path>'
        return
    start = min(across(_begin(mark)), end - MIN_BAR)
    yield (
        f'<rect x="{start:.1f}" y="{top + 8}" width="{end - start:.1f}" height="{LANE - 16}" '
        f'rx="2" fill="{colour}" fill-opacity="0.8">{title}</rect>'
    )


def _legend(marks: Sequence[Mark], y: float) -> Iterator[str]:
    x = float(LEFT)
    for kind, colour in COLOURS.items():
        if any(mark.kind == kind for mark in marks):
            yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colour}"/>'
            yield f'<text x="{x + 16}" y="{y}" fill="#223">{kind}</text>'
            x += 34 + 7 * len(kind)
