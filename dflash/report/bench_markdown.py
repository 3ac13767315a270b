"""A bench as markdown, for a pull request: a table a shape, the rest folded away."""

from collections.abc import Iterator, Sequence

from dflash.measurement import Bench
from dflash.report.bench_columns import (
    Table,
    groups,
    other_comparisons,
    remarks,
    slow_remarks,
    summary,
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

SIGNS = {"!!": "**failed** ", "??": "**note** ", "--": "", "": ""}


def bench_markdown(bench: Bench) -> str:
    """Speed of every group in sight, memory, start-up and the rest behind a click."""
    lines = [f"### dflash bench: {plain(bench.device)}", "", plain(headline(bench)), ""]
    if not bench.complete:
        lines += ["**Incomplete: it was interrupted.**", ""]
    covered = rows_of_curves(bench)
    for group in groups(bench):
        if all(row.name in covered for row in group.rows):
            continue
        lines += [f"#### {plain(group.title)}", "", *markdown_table(summary(group)), ""]
        lines += bullets([*slow_remarks(group), *remarks(group.rows)])
        rest = tables(group)[1:]
        folded = [line for table in rest for line in ("", *markdown_table(table))]
        lines += _folded(", ".join(table.headings[0] for table in rest), folded)
    lines += bullets(("", comparison_text(each)) for each in other_comparisons(bench))
    for curve in bench.scaling:
        said = [("", text) for text in curve_findings(curve)]
        said += remarks(curve_rows(curve, bench), with_shape=True)
        lines += [f"#### {plain(curve_title(curve, bench))}", ""]
        lines += [*markdown_table(curve_table(curve, bench)), "", *bullets(said)]
    lines += bullets(conditions(bench))
    return "\n".join([*lines, *code(bench.command), ""])


def markdown_table(table: Table) -> list[str]:
    """*table* with figures to the right."""
    widest = len(table.headings)
    lines = [_row(table.headings), _row(["---", *["---:"] * (widest - 1)])]
    instead = table.instead or [""] * len(table.cells)
    for cells, told in zip(table.cells, instead, strict=True):
        if told:
            lines.append(_row([cells[0], told, *[""] * (widest - 2)]))
        elif any(cells[1:]):
            lines.append(_row(cells))
    return lines


def bullets(said: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> list[str]:
    """Signs and sentences as a list, with an empty line after it."""
    lines = [f"- {SIGNS[sign]}{plain(text)}" for sign, text in said]
    return [*lines, ""] if lines else []


def code(text: str) -> list[str]:
    """*text* in a fence longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [fence, text, fence]


def plain(text: str) -> str:
    """*text* on one line, in which nothing is markup, a mention or the end of a cell."""
    for letter in "\\`*_<>[]|#~":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("@", "@\u200b").split())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(plain, cells))} |"


def _folded(summary: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [f"<details><summary>{summary}</summary>", *lines, "", "</details>", ""]
