"""A bench as one self-contained page: no script, nothing to fetch, one file."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from textwrap import dedent

from dflash.environment import gpus_text
from dflash.measurement import Bench, Row
from dflash.report.bench_columns import (
    Group,
    Table,
    groups,
    other_comparisons,
    remarks,
    slow_remarks,
    tables,
)
from dflash.report.bench_figures import (
    anchor,
    colours,
    curve_figure,
    memory_bars,
    memory_curves,
    section_parts,
    speed_bars,
    step_strips,
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
from dflash.report.layout import command_lines
from dflash.report.page_style import style

KINDS = {"!!": "bad", "??": "warn", "--": "dim", "": ""}


def bench_html(bench: Bench) -> str:
    """The whole page: what to heed, every shape with its figures, curves, machine, command."""
    title = f"dflash bench: {bench.device}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style()}\n</style></head><body>",
        f"<h1>dflash bench</h1>\n<p>{escape(headline(bench))}</p>",
        *_said(_heed(bench)),
    ]
    covered = rows_of_curves(bench)
    in_curves = [group for group in groups(bench) if {row.name for row in group.rows} <= covered]
    for section in section_parts([group for group in groups(bench) if group not in in_curves]):
        parts += _section(section)
    others = [("", comparison_text(each)) for each in other_comparisons(bench)]
    if others:
        parts += ["<h2>Compared across sections</h2>", *_said(others)]
    parts += _curves(bench)
    if in_curves:
        parts += ["<details><summary>all figures of every value</summary>", *_all(in_curves)]
        parts.append("</details>")
    parts += _machine(bench)
    return "\n".join([*parts, "</body></html>", ""])


def _heed(bench: Bench) -> Iterator[tuple[str, str]]:
    if not bench.complete:
        yield "??", "incomplete: it was interrupted"
    yield from ((sign, text) for sign, text in conditions(bench) if sign)


def _section(parts: Sequence[Group]) -> Iterator[str]:
    numbers = colours(parts)
    yield f"<h2>{escape(parts[0].case)}, {escape(parts[0].shape)}</h2>"
    yield from speed_bars(parts, numbers)
    yield from step_strips(parts, numbers)
    yield from memory_bars(parts, numbers)
    yield from memory_curves(parts, numbers)
    yield "<h3>All figures</h3>"
    for part in parts:
        if len(parts) > 1:
            yield f"<h4>{escape(part.lengths)} lengths</h4>"
        for table in tables(part):
            yield from _table(table)
        yield from _said(slow_remarks(part))
        yield from _said(remarks([row for row in part.rows if row.state != "failed"]))
        yield from _failures(part.rows)
        yield from _more(part.rows)


def _all(parts: Sequence[Group]) -> Iterator[str]:
    for part in parts:
        yield f"<h4>{escape(part.title)}</h4>"
        for table in tables(part):
            yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    yield f'<div class="scroll"><table><tr>{heads}</tr>'
    instead = table.instead or [""] * len(table.cells)
    for cells, told in zip(table.cells, instead, strict=True):
        if told:
            span = max(len(cells) - 1, 1)
            rest = f'<td colspan="{span}" style="text-align:left" class="dim">{escape(told)}</td>'
            yield f"<tr><td>{escape(cells[0])}</td>{rest}</tr>"
        elif any(cells[1:]):
            yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.failed is None:
            continue
        (_, told), *explained = remarks([row])
        lines = escape(told) + "".join(f"<br><code>{escape(text)}</code>" for _, text in explained)
        yield f'<ul class="said" id="{escape(anchor(row))}"><li class="bad">{lines}</li></ul>'
        if row.failed.traceback:
            yield f"<details><summary>{escape(row.mode)}: traceback</summary>"
            yield f"{_pre(row.failed.traceback)}</details>"


def _more(rows: Sequence[Row]) -> Iterator[str]:
    found = {
        row.mode: row.more
        for row in rows
        if any(isinstance(value, dict | list) for value in row.more.values())
    }
    if found:
        yield "<details><summary>what only this case reports</summary>"
        yield f"{_pre(_json(found))}</details>"


def _curves(bench: Bench) -> Iterator[str]:
    for curve in bench.scaling:
        yield f"<h2>{escape(curve_title(curve, bench))}</h2>"
        rows = curve_rows(curve, bench)
        said = [("", text) for text in curve_findings(curve)]
        said += remarks([row for row in rows if row.state != "failed"], with_shape=True)
        yield from _said(said)
        yield curve_figure(curve)
        yield from _table(curve_table(curve, bench))
        yield from _failures(rows)


def _machine(bench: Bench) -> Iterator[str]:
    where = bench.environment
    packages = ", ".join(f"{name} {version}" for name, version in where.packages.items() if version)
    gpus = gpus_text(where, [f"{gpu.name} ({gpu.memory_gib:.1f} GiB)" for gpu in where.gpus])
    memory = "" if where.memory_gib is None else f", {where.memory_gib:.0f} GiB"
    facts = {
        "measured on": bench.device,
        "GPUs": gpus,
        "driver": where.driver or "none",
        "CUDA": where.cuda_build or "none",
        "machine": f"{where.cpu_cores} cores{memory}, {where.platform}",
        "Python": where.python,
        "packages": packages,
        "dflash": f"{where.dflash}, commit {bench.commit or 'unknown'}",
    }
    yield "<h2>How far to believe it</h2>"
    yield from _said(conditions(bench))
    yield '<h2>Machine and software</h2>\n<table class="facts">'
    for name, text in facts.items():
        yield f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
    yield "</table>"
    yield f"<details><summary>shapes</summary>{_pre(_json(bench.shapes))}</details>"
    yield f"<details><summary>options</summary>{_pre(_json(bench.options))}</details>"
    command = dedent("\n".join(command_lines(bench.command)))
    yield f"<h2>To repeat it</h2>\n{_pre(command)}"


def _said(lines: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Iterator[str]:
    items = [f'<li class="{KINDS[sign]}">{escape(text)}</li>' for sign, text in lines]
    if items:
        yield f'<ul class="said">{"".join(items)}</ul>'


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
