"""Tables, sentences and commands on lines of at most 78 columns; no name is cut.

Not here: what they say.
"""

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from dflash.report.bench_columns import Table

WIDTH = 78
INDENT = "  "
GAP, TIGHT = "  ", " "
MOST_BESIDE = 40  # letters of a name beside which figures fit


def table_lines(table: Table) -> list[str]:
    """*table* in columns; those that do not fit beside the names go below, with the names again.

    A name too long to stand beside anything has a line of its own.
    """
    names, *figures = zip(table.headings, *table.cells, strict=True)
    lines: list[str] = []
    for at, part in enumerate(_parts(names, figures)):
        lines += _block(names, part, () if at else table.instead)
    return lines


def _width(names: Sequence[str], figures: Sequence[Sequence[str]], gap: str) -> int:
    beside = len(INDENT) + max(map(len, _beside(names))) + len(GAP) - len(gap)
    return beside + sum(len(gap) + max(map(len, column)) for column in figures)


def _parts(names: Sequence[str], figures: Sequence[Sequence[str]]) -> list[Sequence[Sequence[str]]]:
    """All *figures* if they fit in one line, else as many a part as do.

    A column without a heading belongs to the one before it.
    """
    if _width(names, figures, TIGHT) <= WIDTH:
        return [figures]
    inseparable: list[list[Sequence[str]]] = []
    for column in figures:
        if column[0] or not inseparable:
            inseparable.append([])
        inseparable[-1].append(column)
    parts: list[list[Sequence[str]]] = [[]]
    for columns in inseparable:
        if parts[-1] and _width(names, [*parts[-1], *columns], GAP) > WIDTH:
            parts.append([])
        parts[-1] += columns
    return list(parts)


def _block(
    names: Sequence[str], figures: Sequence[Sequence[str]], instead: Sequence[str]
) -> Iterator[str]:
    gap = GAP if _width(names, figures, GAP) <= WIDTH else TIGHT
    beside, widths = _beside(names), [max(map(len, column)) for column in figures]
    head = max(map(len, beside))
    for at, name in enumerate(names):
        cells = [f"{column[at]:>{width}}" for column, width in zip(figures, widths, strict=True)]
        told = instead[at - 1] if at and instead else ""
        if not (told or any(column[at] for column in figures) or not figures):
            continue
        if name != beside[at]:
            yield from wrapped("", name)
        yield f"{INDENT}{beside[at]:<{head}}{GAP}{told or gap.join(cells)}".rstrip()


def _beside(names: Sequence[str]) -> Sequence[str]:
    return [name if len(name) <= MOST_BESIDE else "" for name in names]


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


def title_lines(text: str) -> list[str]:
    """*text* from the first column on."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False)
