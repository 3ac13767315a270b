"""What the page of a bench draws: bars of speed and memory, strips of steps, curves of memory."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from dflash.measurement import Memory, Row, Scaling
from dflash.report.bars import Bar, bars, reach
from dflash.report.bench_columns import Group, outcome
from dflash.report.numbers import estimate_text, number, rate_unit, rough
from dflash.report.strips import Strip, scale_of, strips
from dflash.report.svg import COLOURS, Panel, Series, figure

Numbers = Mapping[str, int]
"""Of every mode its colour, the same in all figures of a section."""


def colours(parts: Sequence[Group]) -> Numbers:
    """A number for every mode of *parts*, in the order in which they appear."""
    modes = dict.fromkeys(row.mode for part in parts for row in part.rows)
    return {mode: place % len(COLOURS) for place, mode in enumerate(modes)}


def anchor(row: Row) -> str:
    """Where the page tells how *row* failed."""
    return "row-" + "-".join(row.name.split())


def speed_bars(parts: Sequence[Group], numbers: Numbers) -> Iterator[str]:
    """Units a second of every mode, with intervals; all *parts* on one scale."""
    made = [[_speed_bar(part, row, numbers) for row in part.rows] for part in parts]
    unit = rate_unit(parts[0].rows[0].unit)
    yield f"<h3>{escape(unit)}</h3>"
    yield (
        '<p class="note">More is better. The short line on a bar is its 95 % interval. The verdict'
        " rests on the 99 % interval of the ratio of step times, turn beside turn.</p>"
    )
    yield from _parts(parts, made)


def memory_bars(parts: Sequence[Group], numbers: Numbers) -> Iterator[str]:
    """Peaks of every mode that has any: allocated, reserved, of the process, and the plan's."""
    made = [[_memory_bar(row, numbers) for row in part.rows] for part in parts]
    made = [[bar for bar in some if bar.value is not None] for some in made]
    drawn = [bar for some in made for bar in some]
    if not drawn:
        return
    on_gpu = any(bar.behind is not None for bar in drawn)
    keys = [("", "allocated"), ("pale", "/ reserved")] if on_gpu else [("", "resident on the host")]
    if any(bar.tick is not None for bar in drawn):
        keys.append(("mark", "predicted by the memory plan"))
    legend = "".join(f'<span class="key {kind}"></span>{text}' for kind, text in keys)
    yield f'<h3>Peak memory, GiB</h3>\n<p class="legend">{legend}</p>'
    yield from _parts(parts, made)


def step_strips(parts: Sequence[Group], numbers: Numbers) -> Iterator[str]:
    """Every step of every mode, before and after timing began."""
    rows = [row for part in parts for row in part.rows if row.step_ms is not None and row.turns_ms]
    if not rows:
        return
    yield "<h3>Every step</h3>"
    yield (
        '<p class="note">A dot is a step: how far it lies from the median of its mode. Turns are'
        " shaded in turn; before them, on the left, the untimed first steps. Red dots on an edge"
        " lie beyond it.</p>"
    )
    for part in parts:
        drawn = [row for row in part.rows if row in rows]
        if drawn:
            yield from _part_title(parts, part)
            scale = scale_of(max(map(_unrest, drawn)))
            yield strips([_strip(row, numbers) for row in drawn], scale=scale)


def memory_curves(parts: Sequence[Group], numbers: Numbers) -> Iterator[str]:
    """Reserved and allocated GiB over the steps, every mode a line; both on one scale."""
    rows = [row for part in parts for row in part.rows]
    top = max((gib for row in rows for gib in _series(row, "reserved_gib")), default=0.0)
    reserved = _memory_panels(parts, numbers, kind="reserved_gib", top=top)
    allocated = _memory_panels(parts, numbers, kind="allocated_gib", top=top)
    if reserved:
        yield "<h3>Memory over the steps</h3>"
        yield f'<div class="figure scroll">{figure("Reserved: peak so far", reserved)}</div>'
    if allocated:
        drawn = figure("Allocated: peak so far", allocated)
        yield "<details><summary>allocated over the steps</summary>"
        yield f'<div class="figure scroll">{drawn}</div></details>'


def _memory_panels(
    parts: Sequence[Group], numbers: Numbers, *, kind: str, top: float
) -> list[Panel]:
    panels = []
    for part in parts:
        lines = [
            Series(row.mode, points, number=numbers[row.mode])
            for row in part.rows
            if row.memory is not None
            and (points := list(zip(row.memory.steps, _series(row, kind), strict=False)))
        ]
        label = f"GiB, {part.lengths} lengths" if len(parts) > 1 else "GiB"
        if lines:
            panels.append(Panel("step", label, lines, floor=0.0, ceiling=top))
    return panels


def curve_figure(curve: Scaling) -> str:
    """Step time and memory over what was swept; "" where nothing was measured."""
    measured = _points(curve.values, curve.step_ms)
    if not measured:
        return ""
    peaks, planned = (_points(curve.values, gib) for gib in (curve.peak_gib, curve.planned_gib))
    memory = [
        Series("memory plan", planned, number=1),
        Series("measured peak", peaks, marked=True, number=0),
    ]
    drawn = [
        ("step ms", [Series("median", measured, marked=True)]),
        ("GiB", [line for line in memory if line.points]),
    ]
    panels = [
        Panel(curve.over, label, lines, floor=0.0, across=curve.values)
        for label, lines in drawn
        if lines
    ]
    return f'<div class="figure scroll">{figure(f"cost over {curve.over}", panels)}</div>'


def section_parts(bench_groups: Sequence[Group]) -> list[list[Group]]:
    """Groups of one case and shape together: they differ in their lengths."""
    sections: dict[tuple[str, str], list[Group]] = {}
    for group in bench_groups:
        sections.setdefault((group.case, group.shape), []).append(group)
    return list(sections.values())


def verdict_html(word: str) -> str:
    """A verdict in its colour."""
    return f'<span class="{escape(word)}">{escape(word)}</span>'


def _parts(parts: Sequence[Group], made: Sequence[Sequence[Bar]]) -> Iterator[str]:
    top = reach([bar for some in made for bar in some])
    for part, some in zip(parts, made, strict=True):
        if some:
            yield from _part_title(parts, part)
            yield bars(some, top=top)


def _part_title(parts: Sequence[Group], part: Group) -> Iterator[str]:
    if len(parts) > 1:
        yield f"<h4>{escape(part.lengths)} lengths</h4>"


def _instead(row: Row) -> str:
    if row.state == "failed":
        return f'<a href="#{escape(anchor(row))}" class="bad">{escape(outcome(row))}</a>'
    return escape(f"{outcome(row)}: {row.why}" if row.why else outcome(row) or "not known")


def _speed_bar(part: Group, row: Row, numbers: Numbers) -> Bar:
    if row.per_s is None or row.state != "measured":
        return Bar(row.mode, numbers[row.mode], instead=_instead(row))
    text = escape(estimate_text(row.per_s))
    found = part.compared.get(row.name)
    if row.mode == part.baseline:
        text += ' <span class="dim">baseline</span>'
    elif found is not None:
        ratio = escape(estimate_text(found.ratio, digits=3))
        text += f" {verdict_html(found.verdict)}<br><span class='dim'>step time {ratio}</span>"
    return Bar(
        row.mode,
        numbers[row.mode],
        value=row.per_s.value,
        low=row.per_s.low,
        high=row.per_s.high,
        text=text,
    )


def _memory_bar(row: Row, numbers: Numbers) -> Bar:
    found = row.memory or Memory()
    allocated, reserved = found.peak_allocated_gib, found.peak_reserved_gib
    gpu = [rough(gib) for gib in (allocated, reserved) if gib is not None]
    told = [" / ".join(gpu)] if gpu else []
    if found.process_gib is not None:
        told.append(f"process {rough(found.process_gib)}")
    if not gpu and found.rss_gib is not None:
        told.append(f"host {rough(found.rss_gib)}")
    longest = (allocated, found.process_gib, found.rss_gib)
    value = next((gib for gib in longest if gib is not None), None)
    return Bar(
        row.mode,
        numbers[row.mode],
        value=value,
        behind=reserved,
        tick=found.planned_gib,
        text=", ".join(told),
    )


def _strip(row: Row, numbers: Numbers) -> Strip:
    assert row.step_ms is not None
    first = [] if row.start_up is None else row.start_up.first_steps_ms
    told = f"median {number(row.step_ms.median)} ms, max {number(row.step_ms.max)} ms"
    if first:
        some = ", ".join(number(value) for value in first[:3])
        told = f"first steps {some}{' ..' if len(first) > 3 else ''} ms; {told}"  # noqa: PLR2004
    return Strip(
        row.mode,
        numbers[row.mode],
        first_ms=first,
        turns_ms=row.turns_ms,
        median_ms=row.step_ms.median,
        text=escape(told),
    )


def _unrest(row: Row) -> float:
    assert row.step_ms is not None
    spread = row.step_ms
    return max(spread.p90 - spread.median, spread.median - spread.p10) / (spread.median or 1.0)


def _series(row: Row, kind: str) -> list[float]:
    return [] if row.memory is None else getattr(row.memory, kind)


def _points(values: Sequence[float], figures: Sequence[float | None]) -> list[tuple[float, float]]:
    pairs = zip(values, figures, strict=True)
    return [(value, figure) for value, figure in pairs if figure is not None]
