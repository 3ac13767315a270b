"""The way in: the one place that turns an error into a message and an exit code."""

import os
import sys
from collections.abc import Sequence

from dflash import __version__
from dflash.cli.commands import call, help_text
from dflash.cli.interrupts import INTERRUPTED_EXIT
from dflash.cli.output import leave_now
from dflash.errors import INTERNAL_EXIT, DflashError

BROKEN_PIPE_EXIT = 141  # 128 + SIGPIPE: whoever read the output left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code (table in the README)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        return _pipe_closed()
    except DflashError as error:
        print(f"error: {error.what}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        if error.threads_left:
            leave_now(error.exit_code)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - a bug of ours ends in a crash file
        from dflash.cli.crash import report_crash

        report_crash(error, argv)
        return INTERNAL_EXIT
    return 0


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("--help", "-h"):
        print(help_text())
    elif argv[0] == "--version":
        print(f"dflash {__version__}")
    else:
        call(argv[0], argv[1:])


def _exit_code(stop: SystemExit) -> int:
    """The code of *stop*; typer hides an interrupt or a closed pipe behind code 1."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return _interrupted()
        if isinstance(cause, BrokenPipeError):
            return _pipe_closed()
        cause = cause.__cause__ or cause.__context__
    if stop.code is None or isinstance(stop.code, int):
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return _pipe_closed()
        return stop.code or 0
    print(f"error: {stop.code}", file=sys.stderr)
    return 1


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED_EXIT


def _pipe_closed() -> int:
    """Say nothing, not even when the interpreter flushes on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE_EXIT


if __name__ == "__main__":
    sys.exit(main())
