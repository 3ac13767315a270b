"""Two benches beside each other, as lines of at most 78 columns and as markdown."""

from collections.abc import Iterator

from dflash.measurement import Change, Changes
from dflash.report.bench_columns import Table
from dflash.report.bench_markdown import bullets, markdown_table, plain
from dflash.report.layout import table_lines, wrapped
from dflash.report.numbers import estimate_text, number


def change_lines(changes: Changes) -> list[str]:
    """Which two, what else differs between them, every figure of every row, and what broke."""
    lines = [*wrapped("", f"before  {changes.before}"), *wrapped("", f"after   {changes.after}")]
    lines += [line for text in changes.differences for line in wrapped("??", text)]
    for row, table in _tables(changes):
        lines += ["", row, *table_lines(table)]
    said = [*_judged(changes), *(("--", note) for note in changes.notes)]
    lines += [""] * bool(said)
    return [*lines, *(line for sign, text in said for line in wrapped(sign, text))]


def changes_markdown(changes: Changes) -> str:
    """The same for a pull request."""
    lines = ["### dflash bench compare", ""]
    lines += bullets([("", f"before: {changes.before}"), ("", f"after: {changes.after}")])
    lines += bullets([("??", text) for text in changes.differences])
    for row, table in _tables(changes):
        lines += [f"#### {plain(row)}", "", *markdown_table(table), ""]
    lines += bullets([*_judged(changes), *(("--", note) for note in changes.notes)])
    return "\n".join(lines)


def _tables(changes: Changes) -> Iterator[tuple[str, Table]]:
    for row in dict.fromkeys(each.row for each in changes.changes):
        cells = [_cells(each) for each in changes.changes if each.row == row]
        headings = ["figure", "before", "after", "after / before", ""]
        yield row, Table(headings=headings, cells=cells, instead=[])


def _cells(change: Change) -> list[str]:
    ratio = "" if change.ratio is None else estimate_text(change.ratio, digits=4)
    undecided = change.rule and change.regression is None
    judged = "REGRESSION" if change.regression else "undecided" if undecided else change.verdict
    return [change.figure, number(change.before), number(change.after), ratio, judged]


def _judged(changes: Changes) -> Iterator[tuple[str, str]]:
    for each in changes.changes:
        ratio = "" if each.ratio is None else f", {estimate_text(each.ratio)} of before"
        if each.regression:
            yield "!!", f"{each.row}: {each.figure} breaks {each.rule!r}{ratio}"
        elif each.rule and each.regression is None:
            yield "??", f"{each.row}: {each.figure} cannot be judged by {each.rule!r}{ratio}"
