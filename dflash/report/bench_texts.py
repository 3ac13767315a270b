"""What is said of a bench, on the screen, in markdown and on the page alike."""

from collections.abc import Iterator, Sequence

from dflash.measurement import Bench, Comparison, Row, Scaling, Weather
from dflash.report.bench_columns import Table, outcome
from dflash.report.numbers import estimate_text, number, rough


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
    figures = zip(
        curve.values, curve.step_ms, curve.peak_gib, curve.planned_gib, curve_rows(curve, bench),
        strict=True,
    )  # fmt: skip
    cells = [
        [f"{value:,.10g}", number(step_ms), rough(peak), rough(planned), outcome(row)]
        for value, step_ms, peak, planned, row in figures
    ]
    headings = [curve.over, "ms", "peak GiB", "planned GiB", ""]
    kept = [0, *(at for at in range(1, len(headings)) if any(line[at] for line in cells))]
    return Table(
        headings=[headings[at] for at in kept],
        cells=[[line[at] for at in kept] for line in cells],
        instead=[],
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
        yield f"by the memory plan {curve.over} = {curve.wall:,.0f} is the first that does not fit"


def conditions(bench: Bench) -> Iterator[tuple[str, str]]:
    """Sign and sentence of everything that bears on how far the figures can be believed."""
    if bench.matrix_tflops is not None:
        rate = f"{number(bench.matrix_tflops)} TFLOP/s"
        yield "", f"bf16 matrix product of 8192 x 8192 in the same run: {rate}"
    if bench.overhead_share is not None:
        costs = bench.overhead_share
        interval = f"{costs.low:.2%} to {costs.high:.2%}"
        yield "", f"measuring costs {costs.value:.2%} of a step ({interval})"
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
    if weather.power_limited_share is not None:
        figures.append(f"at its power limit {weather.power_limited_share:.0%} of the time")
    if figures:
        yield "", f"GPU while steps were timed: {', '.join(figures)}; {weather.samples} samples"
    for each in weather.spoiled:
        yield "??", f"{each.what}: {each.text}"
    if weather.unknown_because:
        yield "", f"not watched: {weather.unknown_because}"
