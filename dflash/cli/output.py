"""Results on stdout, talk on stderr; plain text and no control codes without a terminal."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def leave_now(code: int) -> NoReturn:
    """End the process although threads still run, under which the interpreter could not end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_lines(lines: Iterable[str], style_of: Callable[[str], str]) -> None:
    """Lines as they are; on a terminal each in the style that rich calls ``style_of(line)``."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        console.print(Text(line, style=style_of(line)))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """A table: drawn by rich on a terminal, aligned columns otherwise."""
    if not sys.stdout.isatty():
        print("\n".join(plain_table(headings, rows, title=title)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def plain_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = ""
) -> list[str]:
    lines = [tuple(headings), *(tuple(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return [title, *text] if title else text
