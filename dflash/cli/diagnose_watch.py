"""``dflash diagnose watch -- COMMAND``: run a user's own program and say what it suffered from."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash.cli.interrupts import TOGETHER_S
from dflash.cli.options import JsonOut
from dflash.cli.output import (
    check_outputs,
    json_file,
    print_json_text,
    raise_all,
    talk,
    write_all,
)
from dflash.errors import MissingError
from dflash.readable import signal_number

if TYPE_CHECKING:
    from dflash.diagnose.findings import WatchDiagnosis
    from dflash.diagnose.watch import Watched

FOUND_EXIT, STALL_EXIT = 1, 5
SIGNALLED = 128
STDERR = 2


def watch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="a program of your own and its arguments"),
    ] = None,
    *,
    stall: Annotated[
        float,
        typer.Option(
            "--stall", "--timeout-stall", min=0.5, help="seconds without output and work: a stall"
        ),
    ] = 300.0,
    kill_on_stall: Annotated[
        bool, typer.Option("--kill-on-stall", help="end it then, and exit with 5")
    ] = False,
    json_out: JsonOut = None,
    fail_on: Annotated[
        Literal["error", "warning", "never"], typer.Option(help="what makes the exit code 1")
    ] = "error",
) -> None:
    """Run a program, pass on what it says, and name the failure modes that it suffered from.

    The program knows nothing of it. What was found goes to stderr, behind the program's own. With
    --json - the program's stdout goes there too. Exit code: 5 if the program was ended for a stall,
    1 if something was found, else the program's own (128 + the signal that ended it). Where torch
    cannot be imported the program is run all the same, and nothing is diagnosed.
    """
    check_outputs(json_out)
    if find_spec("torch") is None:
        raise MissingError("torch is not installed", hint="pip install torch")
    from dflash.diagnose.watch import Plan
    from dflash.diagnose.watch import watch as watch_program

    sys.stdout.flush()
    plan = Plan(
        stall_s=stall,
        kill_on_stall=kill_on_stall,
        stdout=STDERR if json_out == "-" else None,
        together_s=TOGETHER_S,
    )
    watched = watch_program(command or [], plan=plan, talk=talk)
    _give(_diagnosed(watched), json_out=json_out, fail_on=fail_on)


def _diagnosed(watched: "Watched") -> "WatchDiagnosis":
    """What it suffered from; the detectors take torch, which is imported no sooner than here."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        why = f"torch cannot be imported: {type(error).__name__}: {error}"
        return watched.undiagnosed(why)
    from dflash.diagnose.verdicts import diagnose_watched

    return diagnose_watched(watched)


def _give(found: "WatchDiagnosis", *, json_out: str | None, fail_on: str) -> None:
    from dflash.report.diagnosis import watch_lines

    text = found.model_dump_json(indent=2) + "\n"
    failed = write_all([(json_file(json_out), lambda: text)])
    talk("\n".join(watch_lines(found)))
    if json_out == "-":
        print_json_text(text)
    raise_all(failed)
    if code := _exit_code(found, fail_on=fail_on):
        sys.exit(code)


def _exit_code(found: "WatchDiagnosis", *, fail_on: str) -> int:
    if found.ended_for_stall:
        return STALL_EXIT
    if found.suffered and fail_on != "never":
        return FOUND_EXIT
    if found.exit_code is None:
        return SIGNALLED + signal_number(found.signal)
    return found.exit_code
