"""A bench as tables of words: which rows belong together, which figures they have, how each reads.

The screen, markdown and the page show the same cells. Nothing is computed here but the width of an
interval against its value.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

from dflash.measurement import Bench, Comparison, Failed, Graphs, Memory, Row, StartUp
from dflash.report.numbers import estimate_text, number, rate_unit, rough, share

MOST_TOLD = 400


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that differ in their mode only, each with how it compares with the group's baseline."""

    case: str
    shape: str
    lengths: str
    rows: Sequence[Row]
    compared: dict[str, Comparison]
    baseline: str

    @property
    def title(self) -> str:
        """``drafter-step, qwen3-8b-3072, fixed lengths``."""
        return f"{self.case}, {self.shape}, {self.lengths} lengths"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every row; "" where a row lacks it."""

    heading: str
    text: Callable[[Row], str]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of one kind of figure: a heading and a cell a row for each column, mode first.

    ``instead`` holds what is said of a row that has no such figures.
    """

    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    instead: Sequence[str]


def groups(bench: Bench) -> list[Group]:
    """The rows of *bench* by case, shape and lengths, in the order in which these first appear."""
    by_key: dict[tuple[str, str, str], list[Row]] = {}
    for row in bench.rows:
        by_key.setdefault((row.case, row.shape, row.lengths), []).append(row)
    return [_group(key, rows, bench.comparisons) for key, rows in by_key.items()]


def _group(
    key: tuple[str, str, str], rows: Sequence[Row], comparisons: Sequence[Comparison]
) -> Group:
    modes = {row.name: row.mode for row in rows}
    inside = [each for each in comparisons if each.row in modes and each.baseline in modes]
    baseline = inside[0].baseline if inside else ""
    compared: dict[str, Comparison] = {}
    for each in inside:
        if each.baseline == baseline:
            compared.setdefault(each.row, each)
    return Group(*key, rows=rows, compared=compared, baseline=modes.get(baseline, ""))


def other_comparisons(bench: Bench) -> list[Comparison]:
    """Those that no group shows: across lengths or shapes, or with a second baseline."""
    shown = [each for group in groups(bench) for each in group.compared.values()]
    return [each for each in bench.comparisons if each not in shown]


def speed(group: Group) -> Table:
    """Units a second, step times, and the step time against the baseline's with its verdict."""
    return _table("speed", _speed(group), group.rows)


def summary(group: Group) -> Table:
    """Speed, and of memory and start-up one figure each: what fits into a pull request."""
    columns = [
        *_speed(group),
        Column("reserved GiB", _memory(lambda found: found.peak_reserved_gib)),
        Column("first step s", _start_up(lambda found: found.first_step_s)),
    ]
    return _table("mode", columns, group.rows)


def _speed(group: Group) -> list[Column]:
    unit = next((row.unit for row in group.rows), "token")
    return [
        Column(rate_unit(unit), lambda row: estimate_text(row.per_s)),
        Column("ms", lambda row: "" if row.step_ms is None else number(row.step_ms.median)),
        Column("p10", lambda row: "" if row.step_ms is None else number(row.step_ms.p10)),
        Column("p90", lambda row: "" if row.step_ms is None else number(row.step_ms.p90)),
        Column("max", lambda row: "" if row.step_ms is None else number(row.step_ms.max)),
        Column(f"of {group.baseline}", lambda row: _ratio(group, row)),
        Column("", lambda row: _verdict(group, row)),
    ]


def start_up(group: Group) -> Table:
    """Seconds before the first timed step, and when they are won back."""
    columns = [
        Column("1st step", _start_up(lambda found: found.first_step_s)),
        Column("build", _start_up(lambda found: found.build_s)),
        Column("warm-up", _start_up(lambda found: found.warm_up_s)),
        Column("compile", _start_up(lambda found: found.compile_s)),
        Column("cached", _cached),
        Column("capture", _start_up(lambda found: found.capture_s)),
        Column("pays back", _pays_back),
    ]
    return _table("start-up s", columns, group.rows)


def memory(group: Group) -> Table:
    """GiB at their peaks, beside what the memory plan predicts."""
    columns = [
        Column("allocated", _memory(lambda found: found.peak_allocated_gib)),
        Column("reserved", _memory(lambda found: found.peak_reserved_gib)),
        Column("pools", _memory(lambda found: found.graph_pools_gib)),
        Column("process", _memory(lambda found: found.process_gib)),
        Column("host", _memory(lambda found: found.rss_gib)),
        Column("planned", _memory(lambda found: found.planned_gib)),
    ]
    return _table("memory GiB", columns, group.rows)


def counts(group: Group) -> Table:
    """What should be nought after the first step, and the graphs that were captured and skipped."""
    columns = [
        Column("allocs", _memory(lambda found: found.device_allocs)),
        Column("retries", _memory(lambda found: found.alloc_retries)),
        Column("recompiles", _graphs(lambda found: found.recompiles)),
        Column("captured late", _graphs(lambda found: found.captured_late)),
        Column("captured", _graphs(lambda found: found.captured)),
        Column("skipped", _graphs(lambda found: found.skipped)),
    ]
    return _table("counts", columns, group.rows)


def work(group: Group) -> Table:
    """How near the hardware it came, and whether it computed what eager does."""
    columns = [
        Column("padded", lambda row: "yes" if row.padded else ""),
        Column("TFLOP/s", lambda row: number(row.model_tflops)),
        Column("of matrix rate", lambda row: share(row.matrix_share)),
        Column("loss", lambda row: "" if row.loss is None else f"{row.loss:.4f}"),
        Column("loss off eager's", lambda row: _off(row.loss_against_eager)),
    ]
    return _table("work", columns, group.rows)


def more(group: Group) -> Table:
    """What only this case reports, as far as it is one word or number a row."""
    names = dict.fromkeys(
        name for row in group.rows for name, value in row.more.items() if _plain(value)
    )
    return _table("more", [Column(name, _more(name)) for name in names], group.rows)


def tables(group: Group) -> list[Table]:
    """All of *group*; those of which no row has a figure are left out, save the first."""
    others = [replace(make(group), instead=[]) for make in (start_up, memory, counts, work, more)]
    return [speed(group), *(table for table in others if len(table.headings) > 1)]


def outcome(row: Row) -> str:
    """``failed: cudagraph-trees``, ``skipped``, or "" of a row that was measured."""
    if row.state == "measured":
        return ""
    if row.failed is None:
        return row.state
    return f"{row.state}: {row.failed.slug or row.failed.type}"


def remarks(rows: Sequence[Row], *, with_shape: bool = False) -> Iterator[tuple[str, str]]:
    """Sign and sentence of what was skipped, failed or spoilt; skipped for one reason: once."""

    def name(row: Row) -> str:
        return f"{row.shape} {row.mode}" if with_shape else row.mode

    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.state == "skipped":
            skipped.setdefault(row.why, []).append(name(row))
    for why, names in skipped.items():
        yield "--", f"{', '.join(names)} skipped: {why or 'no reason given'}"
    for row in rows:
        if row.failed is not None:
            yield "!!", f"{name(row)} failed during {row.failed.during}: {_told(row.failed)}"
            if row.failed.slug:
                yield "", f"dflash explain {row.failed.slug}"
        elif row.state == "failed":
            yield "!!", f"{name(row)} failed: {row.why or 'no reason given'}"
        elif row.state == "measured" and row.why:
            yield "??", f"{name(row)}: {row.why}"


def slow_remarks(group: Group) -> Iterator[tuple[str, str]]:
    """Sign and sentence of every comparison in which slow steps count."""
    for row in group.rows:
        found = group.compared.get(row.name)
        if found is not None and found.slow_steps_count and row.step_ms is not None:
            steps = [step_ms for turn in row.turns_ms for step_ms in turn]
            mean, median = number(sum(steps) / len(steps)), number(row.step_ms.median)
            ratio = f"{row.mode} or {group.baseline} has slow steps in most turns; the ratio is"
            yield "??", f"{ratio} of all steps: {mean} ms is {row.mode}'s mean, {median} its median"


def _told(failed: Failed) -> str:
    message = "".join(letter if letter.isprintable() else " " for letter in failed.message)
    return shorten(f"{failed.type}: {message}".rstrip(": "), MOST_TOLD, placeholder=" ..")


def _table(name: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """Only columns of which some row has a figure."""
    texts = [(column.heading, [column.text(row) for row in rows]) for column in columns]
    kept = [(heading, cells) for heading, cells in texts if any(cells)]
    return Table(
        headings=[name, *(heading for heading, _ in kept)],
        cells=[[row.mode, *(cells[at] for _, cells in kept)] for at, row in enumerate(rows)],
        instead=[outcome(row) for row in rows],
    )


def _ratio(group: Group, row: Row) -> str:
    if row.mode == group.baseline:
        return "1"
    found = group.compared.get(row.name)
    return "" if found is None else estimate_text(found.ratio, digits=3)


def _verdict(group: Group, row: Row) -> str:
    if row.mode == group.baseline:
        return "baseline"
    found = group.compared.get(row.name)
    return "" if found is None else found.verdict


def _start_up(figure: Callable[[StartUp], float | None]) -> Callable[[Row], str]:
    return lambda row: "" if row.start_up is None else rough(figure(row.start_up))


def _cached(row: Row) -> str:
    """How many of the graphs that were compiled torch's compile cache held: ``9/9``."""
    graphs = row.graphs
    if graphs is None or not graphs.compiled or graphs.cached is None:
        return ""
    return f"{graphs.cached}/{graphs.compiled}"


def _pays_back(row: Row) -> str:
    after = None if row.start_up is None else row.start_up.pays_back_after_steps
    return "" if after is None else f"{after:,.0f} steps"


def _memory(figure: Callable[[Memory], float | None]) -> Callable[[Row], str]:
    return lambda row: "" if row.memory is None else rough(figure(row.memory))


def _graphs(figure: Callable[[Graphs], int | None]) -> Callable[[Row], str]:
    return lambda row: "" if row.graphs is None else number(figure(row.graphs))


def _off(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _more(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = row.more.get(name)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float):
            return number(value)
        return value if isinstance(value, str) else ""

    return text
