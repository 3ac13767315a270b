"""Where a diagnosis goes: the screen, or one JSON value, and the files that were asked for."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.cli.output import (
    check_outputs,
    json_file,
    print_json_text,
    print_lines,
    raise_all,
    write_all,
)

if TYPE_CHECKING:
    from dflash.diagnose.findings import Diagnosis


@dataclass(frozen=True, slots=True)
class Reports:
    """``json_out`` "-" is stdout, and then nothing else is printed there."""

    json_out: str | None = None
    junit: Path | None = None
    html: Path | None = None

    def check(self, *read: Path) -> None:
        """Refuse files that cannot be written, before anything is launched.

        Raises:
            UsageError: one cannot, two are the same, or one is among those that are *read*.
        """
        check_outputs(self.json_out, {"--junit": self.junit, "--html": self.html}, read=read)

    def give(self, found: "Diagnosis") -> None:
        """Write every file, then print *found*: whoever reads the screen may leave.

        Raises:
            UsageError: a file cannot be written; the others are, and all is printed.
        """
        files = ((json_file(self.json_out), _json), (self.junit, _junit), (self.html, _html))
        failed = write_all([(path, partial(made, found)) for path, made in files])
        if self.json_out == "-":
            print_json_text(_json(found))
        else:
            _show(found)
        raise_all(failed)


def _show(found: "Diagnosis") -> None:
    from dflash.report.diagnosis import advice_lines, finding_lines, matrix_lines, style_of

    for finding in found.findings:
        print_lines([*finding_lines(finding), ""], style_of)
    if len(found.findings) > 1:
        print_lines([f"torch {found.torch}", *matrix_lines(found)], style_of)
    if found.advice:
        print_lines(["", *advice_lines(found.advice)], style_of)


def _json(found: "Diagnosis") -> str:
    return found.model_dump_json(indent=2) + "\n"


def _junit(found: "Diagnosis") -> str:
    from dflash.report.junit import junit_xml

    return junit_xml(found)


def _html(found: "Diagnosis") -> str:
    from dflash.report.diagnosis_html import diagnosis_html

    return diagnosis_html(found)
