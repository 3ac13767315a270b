"""``dflash bench compare``: what changed between two benches, and whether it is a regression."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli.bench_options import Markdown, share
from dflash.cli.bench_reports import FOUND_EXIT, INCONCLUSIVE_EXIT, BenchReports
from dflash.cli.options import JsonOut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.measurement import Changes
    from dflash_bench.expressions import Rule


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="the earlier bench")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="the later one")],
    *,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="'RULE'", help="'step_ms > +3%'; repeatable"),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="P%", help="smallest difference that counts")
    ] = "1%",
    other_machine: Annotated[
        bool, typer.Option("--other-machine", help="judge although the machines differ")
    ] = False,
    json_out: JsonOut = None,
    markdown: Markdown = None,
) -> None:
    """Compare two files of dflash bench --json, row by row."""
    from dflash_bench.compare import compare_benches
    from dflash_bench.expressions import parse_rule
    from dflash_bench.files import read_bench

    reports = BenchReports(json_out, markdown)
    smallest = share(precision, "--precision")
    benches = read_bench(before), read_bench(after)
    modes = dict.fromkeys(row.mode for bench in benches for row in bench.rows)
    rules = [parse_rule(text, list(modes)) for text in fail_if or []]
    reports.check(before, after)
    changes = compare_benches(
        *benches,
        names=(str(before), str(after)),
        rules=rules,
        precision=smallest,
        other_machine=other_machine,
    )
    reports.give_changes(changes)
    sys.exit(_exit_code(changes, rules))


def _exit_code(changes: "Changes", rules: "Sequence[Rule]") -> int:
    from dflash_bench.compare import is_judged

    asked = [change.regression for change in changes.changes if change.rule]
    if any(asked):
        return FOUND_EXIT
    open_rules = None in asked or not all(is_judged(rule, changes) for rule in rules)
    return INCONCLUSIVE_EXIT if open_rules else 0
