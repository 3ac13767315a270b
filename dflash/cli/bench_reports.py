"""Where a bench and a comparison go: the screen, or one JSON value, and the files asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.cli.interrupts import INTERRUPTED_EXIT
from dflash.cli.output import (
    check_outputs,
    json_file,
    print_json_text,
    print_lines,
    raise_all,
    talk,
    write_all,
)

if TYPE_CHECKING:
    from dflash.measurement import Bench, Changes
    from dflash_bench.expectations import Outcome

FOUND_EXIT = 1
INCONCLUSIVE_EXIT = 4

SIGNS = {"met": "ok", "missed": "!!", "unclear": "??"}


@dataclass(frozen=True, slots=True)
class BenchReports:
    """``json_out`` "-" is stdout, and then nothing else is printed there."""

    json_out: str | None = None
    markdown: Path | None = None
    html: Path | None = None

    def check(self, *read: Path) -> None:
        """Refuse files that cannot be written, before anything is measured.

        Raises:
            UsageError: one cannot, two are the same, or one is among those that are *read*.
        """
        files = {"--markdown": self.markdown, "--html": self.html}
        check_outputs(self.json_out, files, read=read)

    def give(self, bench: "Bench", outcomes: "Sequence[Outcome]" = ()) -> None:
        """Write every file, then print *bench* and what became of the expectations.

        Raises:
            UsageError: a file cannot be written; the others are, and all is printed.
        """
        from dflash.report.bench import bench_lines, style_of
        from dflash.report.bench_html import bench_html
        from dflash.report.bench_markdown import bench_markdown
        from dflash_bench.files import bench_json

        failed = write_all(
            [
                (json_file(self.json_out), lambda: bench_json(bench)),
                (self.markdown, lambda: bench_markdown(bench)),
                (self.html, lambda: bench_html(bench)),
            ]
        )
        if self.json_out == "-":
            print_json_text(bench_json(bench))
            for line in outcome_lines(outcomes):
                talk(line)
        else:
            told = list(outcome_lines(outcomes))
            print_lines([*bench_lines(bench), *([""] if told else []), *told], style_of)
        raise_all(failed)

    def give_changes(self, changes: "Changes") -> None:
        """Write every file, then print a comparison.

        Raises:
            UsageError: a file cannot be written; the other is, and all is printed.
        """
        from dflash.report.bench import style_of
        from dflash.report.bench_changes import change_lines, changes_markdown

        text = changes.model_dump_json(indent=2) + "\n"
        failed = write_all(
            [
                (json_file(self.json_out), lambda: text),
                (self.markdown, lambda: changes_markdown(changes)),
            ]
        )
        if self.json_out == "-":
            print_json_text(text)
        else:
            print_lines(change_lines(changes), style_of)
        raise_all(failed)


def outcome_lines(outcomes: "Sequence[Outcome]") -> Iterator[str]:
    """What became of every expectation."""
    from dflash.report.layout import wrapped

    for outcome in outcomes:
        text = f"{outcome.text} is {outcome.state}: {outcome.why}"
        yield from wrapped(SIGNS[outcome.state], text)


def exit_code(bench: "Bench", outcomes: "Sequence[Outcome]" = ()) -> int:
    """What a command that measured *bench* leaves with."""
    states = {outcome.state for outcome in outcomes}
    rows = {row.state for row in bench.rows}
    if not bench.complete:
        return INTERRUPTED_EXIT
    if "failed" in rows or "missed" in states:
        return FOUND_EXIT
    if "measured" not in rows or "unclear" in states:
        return INCONCLUSIVE_EXIT
    return 0
