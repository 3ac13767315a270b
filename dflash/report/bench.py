"""A bench as lines of at most 78 columns; ``style_of`` says which of them stand out."""

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from dflash.measurement import Bench, Comparison, Row, Scaling, Weather
from dflash.report.bench_columns import (
    Group,
    Table,
    estimate_text,
    groups,
    number,
    other_comparisons,
    outcome,
    remarks,
    share,
    tables,
)

WIDTH = 78
INDENT = "  "
GAP, TIGHT = "  ", " "
STYLES = {"!!": "bold red", "--": "dim", "??": "yellow"}
TITLE = "bold"


def bench_lines(bench: Bench) -> list[str]:
    """Every group of rows as tables, what went wrong with them, curves, and what it ran on."""
    lines = _title(headline(bench))
    if not bench.complete:
        lines += wrapped("??", "incomplete: it was interrupted or out of time")
    covered = rows_of_curves(bench)
    for group in groups(bench):
        if any(row.name not in covered for row in group.rows):
            lines += ["", *_group_lines(group)]
    others = [comparison_text(each) for each in other_comparisons(bench)]
    lines += [""] * bool(others) + [line for text in others for line in wrapped("", text)]
    for curve in bench.scaling:
        lines += ["", *_curve_lines(curve, bench)]
    return [*lines, "", *_conditions(bench)]


def style_of(line: str) -> str:
    """How rich draws *line*; a title is what begins in the first column without a sign."""
    return STYLES.get(line[:2], TITLE if line[:1].strip() else "")


def headline(bench: Bench) -> str:
    """Device, versions, commit, date and how long it took."""
    torch = bench.environment.packages.get("torch") or "unknown"
    commit = "" if bench.commit is None else f", commit {bench.commit}"
    return f"{bench.device}, torch {torch}{commit}, {bench.date}, {bench.wall_s:,.0f} s"


def comparison_text(comparison: Comparison) -> str:
    """Both rows, the ratio of their step times, and the verdict."""
    ratio = estimate_text(comparison.ratio)
    return (
        f"{comparison.row}: step time {ratio} of {comparison.baseline},"
        f" {comparison.verdict} at {comparison.precision:.1%} ({comparison.pairs} pairs)"
    )


def rows_of_curves(bench: Bench) -> set[str]:
    """Names of the rows that a curve shows."""
    return {name for curve in bench.scaling for name in curve.rows}


def curve_rows(curve: Scaling, bench: Bench) -> list[Row]:
    """The row at each value of *curve*."""
    by_name = {row.name: row for row in bench.rows}
    return [by_name[name] for name in curve.rows]


def curve_table(curve: Scaling, bench: Bench) -> Table:
    """A line a value: step time, measured and planned peak."""
    return Table(
        headings=[curve.over, "ms", "peak GiB", "planned GiB"],
        cells=[
            [number(int(value) if value == int(value) else value), *map(number, figures)]
            for value, *figures in zip(
                curve.values, curve.step_ms, curve.peak_gib, curve.planned_gib, strict=True
            )
        ],
        instead=[outcome(row) for row in curve_rows(curve, bench)],
    )


def curve_title(curve: Scaling, bench: Bench) -> str:
    """Case and mode of the curve's rows, and what is swept."""
    row = curve_rows(curve, bench)[0]
    return f"{row.case}, {row.lengths} lengths, {row.mode}: cost over {curve.over}"


def curve_findings(curve: Scaling) -> Iterator[str]:
    """The fitted exponent, and where the memory plan says it ends."""
    if curve.exponent is not None:
        fit = curve.exponent
        yield (
            f"step time grows as {curve.over} to the power"
            f" {fit.value:.2f} ({fit.low:.2f} to {fit.high:.2f})"
        )
    if curve.wall is not None:
        yield f"the memory plan says that {curve.wall:,.0f} does not fit"


def conditions(bench: Bench) -> Iterator[tuple[str, str]]:
    """Sign and sentence of everything that bears on how far the figures can be believed."""
    if bench.matrix_tflops is not None:
        yield "", f"bf16 matrix product in the same run: {number(bench.matrix_tflops)} TFLOP/s"
    if bench.overhead_share is not None:
        yield "", f"measuring costs {bench.overhead_share:.2%} of a step"
    for precision in dict.fromkeys(each.precision for each in bench.comparisons):
        pairs = [each.pairs for each in bench.comparisons if each.precision == precision]
        yield "", f"verdicts at {precision:.1%}, {_range(pairs)} pairs of turns"
    if bench.weather is not None:
        yield from _weather(bench.weather)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _weather(weather: Weather) -> Iterator[tuple[str, str]]:
    figures = []
    if weather.sm_mhz_median is not None:
        clocks = f"{number(weather.sm_mhz_median)} MHz"
        if weather.sm_mhz_low is not None and weather.sm_mhz_high is not None:
            clocks += f" ({number(weather.sm_mhz_low)} to {number(weather.sm_mhz_high)})"
        figures.append(clocks)
    if weather.power_w_median is not None:
        figures.append(f"{weather.power_w_median:,.0f} W")
    if weather.temperature_c_max is not None:
        figures.append(f"at most {weather.temperature_c_max:.0f} C")
    if figures:
        yield "", f"GPU while steps were timed: {', '.join(figures)}; {weather.samples} samples"
    for each in weather.spoiled:
        yield "??", f"{each.what}: {each.text} ({share(each.share)} of the samples)"
    if weather.unknown_because:
        yield "", f"clocks and other processes were not watched: {weather.unknown_because}"


def _conditions(bench: Bench) -> list[str]:
    lines = [line for sign, text in conditions(bench) for line in wrapped(sign, text)]
    return [*lines, "to repeat it:", *command_lines(bench.command)]


def _group_lines(group: Group) -> list[str]:
    lines = _title(group.title)
    for table in tables(group):
        lines += [*table_lines(table), ""]
    lines += (line for sign, text in remarks(group.rows) for line in wrapped(sign, text))
    return lines if lines[-1] else lines[:-1]


def _curve_lines(curve: Scaling, bench: Bench) -> list[str]:
    said = [("", text) for text in curve_findings(curve)]
    said += remarks(curve_rows(curve, bench), with_shape=True)
    lines = _title(curve_title(curve, bench)) + table_lines(curve_table(curve, bench))
    return [*lines, *(line for sign, text in said for line in wrapped(sign, text))]


def table_lines(table: Table) -> list[str]:
    """*table* in columns; those that do not fit beside the names go below, with the names again."""
    names, *figures = zip(table.headings, *table.cells, strict=True)
    lines: list[str] = []
    for at, part in enumerate(_parts(names, figures)):
        lines += _block(names, part, () if at else table.instead)
    return lines


def _width(columns: Iterable[Sequence[str]], gap: str) -> int:
    return len(INDENT) - len(gap) + sum(len(gap) + max(map(len, column)) for column in columns)


def _parts(names: Sequence[str], figures: Sequence[Sequence[str]]) -> list[Sequence[Sequence[str]]]:
    """All *figures* if they fit in one line, else as many a part as do."""
    if _width([names, *figures], TIGHT) <= WIDTH:
        return [figures]
    parts: list[list[Sequence[str]]] = [[]]
    for column in figures:
        if parts[-1] and _width([names, *parts[-1], column], GAP) > WIDTH:
            parts.append([])
        parts[-1].append(column)
    return list(parts)


def _block(
    names: Sequence[str], figures: Sequence[Sequence[str]], instead: Sequence[str]
) -> Iterator[str]:
    gap = GAP if _width([names, *figures], GAP) <= WIDTH else TIGHT
    head, widths = max(map(len, names)), [max(map(len, column)) for column in figures]
    for at, name in enumerate(names):
        cells = [f"{column[at]:>{width}}" for column, width in zip(figures, widths, strict=True)]
        told = instead[at - 1] if at and instead else ""
        if told or any(column[at] for column in figures):
            yield f"{INDENT}{name:<{head}}{GAP}{told or gap.join(cells)}".rstrip()


def wrapped(sign: str, text: str) -> list[str]:
    """*text* behind its sign, on as many lines as it needs; names are not broken."""
    before = f"{sign} " if sign else INDENT
    told = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=before,
        subsequent_indent=" " * len(before),
        break_on_hyphens=False,
    )
    return told or [sign]


def command_lines(command: str) -> list[str]:
    """*command* to paste into a shell, broken between its words where it is long."""
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:  # quotes that do not match: show it as it is
        return [f"{INDENT}{command}"]
    lines: list[str] = [INDENT]
    for word in words:
        if len(lines[-1]) + len(word) + len(" \\") > WIDTH and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(INDENT * 2)
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]


def _title(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False)
