"""The way in: the one place that turns an error into a message and an exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb

from dflash import __version__
from dflash.cli.commands import call, help_text
from dflash.cli.interrupts import INTERRUPTED_EXIT
from dflash.cli.output import leave_now, make_stdout_take_everything
from dflash.errors import INTERNAL_EXIT, DflashError, MissingError, UsageError
from dflash.readable import readable

BROKEN_PIPE_EXIT = 141  # 128 + SIGPIPE: whoever read the output left
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code (table in the README)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    make_stdout_take_everything()
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
        return _told(error)
    except Exception as error:  # noqa: BLE001
        return _unexpected(error, argv)
    return 0


def _unexpected(error: Exception, argv: list[str]) -> int:
    """What is no fault of this machine's is a bug of ours, which ends in a crash file."""
    if known := _of_the_machine(error):
        return _told(known)
    from dflash.cli.crash import report_crash

    report_crash(error, argv)
    return INTERNAL_EXIT


def _told(error: DflashError) -> int:
    """Say it, and return its code; with threads left there is no return."""
    print(f"error: {readable(error.what)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {readable(error.hint)}", file=sys.stderr)
    if error.threads_left:
        leave_now(error.exit_code)
    return error.exit_code


def _of_the_machine(error: Exception) -> DflashError | None:
    """What is no bug of ours: a stdout that takes no more, a torch that cannot be imported."""
    if not isinstance(error, OSError | ImportError):
        return None
    if isinstance(error, OSError) and error.errno in FULL and not _stdout_takes_more():
        _drop_stdout()
        return UsageError(
            f"what was to be printed cannot be written: {error.strerror}",
            hint="see where stdout leads; reports asked for as files are written before",
        )
    places = [Path(frame.filename).parts[-2:] for frame in extract_tb(error.__traceback__)]
    if ("torch", "__init__.py") in places and "torch" not in sys.modules:
        return MissingError(
            f"torch is installed but cannot be imported: {error}",
            hint="python -c 'import torch' shows the same; install it anew for this machine",
        )
    return None


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
    """Say nothing."""
    _drop_stdout()
    return BROKEN_PIPE_EXIT


def _stdout_takes_more() -> bool:
    """Tried by one newline: an error of writing does not say which file it was."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return False
    return True


def _drop_stdout() -> None:
    """Let stdout lead nowhere, also when the interpreter flushes it on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
