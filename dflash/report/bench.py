"""A bench as lines of at most 78 columns; ``style_of`` says which of them stand out."""

from dflash.measurement import Bench, Scaling
from dflash.report.bench_columns import (
    Group,
    groups,
    other_comparisons,
    remarks,
    slow_remarks,
    tables,
)
from dflash.report.bench_texts import (
    comparison_text,
    conditions,
    curve_findings,
    curve_rows,
    curve_table,
    curve_title,
    headline,
    rows_of_curves,
)
from dflash.report.layout import command_lines, table_lines, title_lines, wrapped

STYLES = {"!!": "bold red", "ok": "green", "--": "dim", "??": "yellow"}
TITLE = "bold"


def bench_lines(bench: Bench) -> list[str]:
    """Every group of rows as tables, what went wrong with them, curves, and what it ran on."""
    lines = title_lines(headline(bench))
    if not bench.complete:
        lines += wrapped("??", "incomplete: it was interrupted")
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


def _conditions(bench: Bench) -> list[str]:
    lines = [line for sign, text in conditions(bench) for line in wrapped(sign, text)]
    return [*lines, "to repeat it:", *command_lines(bench.command)]


def _group_lines(group: Group) -> list[str]:
    lines = title_lines(group.title)
    for table in tables(group):
        lines += [*table_lines(table), ""]
    said = [*slow_remarks(group), *remarks(group.rows)]
    lines += (line for sign, text in said for line in wrapped(sign, text))
    return lines if lines[-1] else lines[:-1]


def _curve_lines(curve: Scaling, bench: Bench) -> list[str]:
    said = [("", text) for text in curve_findings(curve)]
    said += remarks(curve_rows(curve, bench), with_shape=True)
    lines = title_lines(curve_title(curve, bench)) + table_lines(curve_table(curve, bench))
    return [*lines, *(line for sign, text in said for line in wrapped(sign, text))]
