"""Results on stdout, talk on stderr; plain text and no control codes without a terminal."""

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NoReturn

from dflash.errors import UsageError


def print_json(value: object) -> None:
    print_json_text(json.dumps(value, indent=2, ensure_ascii=False))


def check_stdout() -> None:
    """Refuse to print a value where stdout was closed before we were started.

    Raises:
        UsageError: it was.
    """
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise UsageError(
            "stdout is closed, so no JSON can be printed",
            hint="let stdout lead somewhere, or name a file where --json takes one",
        )


def give_json(value: object, path: Path | None) -> None:
    """Write *value* as JSON to *path*; print it where there is none.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        print_json(value)
    else:
        write_report(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_json_text(text: str) -> None:
    """A JSON value as text; what stdout's encoding does not have is escaped as JSON does it.

    Raises:
        UsageError: stdout was closed before we were started.
    """
    check_stdout()
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    print(text.removesuffix("\n"))


def make_stdout_take_everything() -> None:
    """Escape what stdout's encoding does not have; a stdout that was closed takes and drops."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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


def check_reports(files: Mapping[str, Path | None], *, read: Iterable[Path] = ()) -> None:
    """Find out before the work is done whether the reports of one command can be written.

    Args:
        files: where each option sends its report, if anywhere.
        read: files that the command reads.

    Raises:
        UsageError: one cannot be written, is one of *read*, or two go to one file.
    """
    named = [(option, path) for option, path in files.items() if path is not None]
    taken = {_whole(path) for path in read}
    for option, path in named:
        if path == Path("-"):
            raise UsageError(
                f"{option} - names no file, and only --json - is stdout",
                hint=f"name a file; {option} /dev/stdout is stdout, beside the table",
            )
        if _whole(path) in taken and not _is_stream(path):
            raise UsageError(
                f"{option} {path} would replace a file that this command reads",
                hint="give the report a file of its own",
            )
        check_writable(path)
    for (one, path), (other, same) in combinations(named, 2):
        if _whole(path) == _whole(same) and not _is_stream(path):
            raise UsageError(
                f"{one} and {other} name one file, {path}, which holds one report",
                hint="give each report a file of its own",
            )


def check_outputs(
    json_out: str | None,
    files: Mapping[str, Path | None] | None = None,
    *,
    read: Iterable[Path] = (),
) -> None:
    """The same of a command with ``--json FILE|-`` and whatever other *files*; "-" is stdout.

    Raises:
        UsageError: as ``check_reports``; stdout is to have it and was closed.
    """
    check_reports({"--json": json_file(json_out), **(files or {})}, read=read)
    if json_out == "-":
        check_stdout()


def json_file(out: str | None) -> Path | None:
    """The file that ``--json`` names, if it names one; "-" is stdout."""
    return None if out in (None, "-") else Path(out)


def check_writable(path: Path) -> None:
    """Find out before the work is done whether a report can be written to *path*.

    Raises:
        UsageError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        beside = _beside(path)
        beside.write_bytes(b"")
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_stream(path: Path) -> bool:
    """Whether it is a device, a pipe or a socket, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _whole(path: Path) -> Path:
    """Where *path* leads, through links."""
    return Path(os.path.realpath(path))


def _beside(path: Path) -> Path:
    """Where a report is made before it takes its place, under a name of our own."""
    whole = _whole(path)
    return whole.with_name(f"{whole.name}.{os.getpid()}.partial")


def check_folder(path: Path, *, replaced: bool) -> None:
    """Find out before the work is done whether a folder can be made or filled at *path*.

    Args:
        replaced: it is made beside and takes the place of what is there.

    Raises:
        UsageError: it cannot, or what would be replaced holds the current folder.
    """
    whole = path.resolve()
    if replaced and whole in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(
            f"the folder {path} holds the current one, so another cannot take its place",
            hint="name a new folder",
        )
    start = whole.parent if replaced else whole
    nearest = next(place for place in (start, *start.parents) if os.path.lexists(place))
    reason = ""
    if not nearest.is_dir():
        reason = os.strerror(errno.ENOTDIR)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EROFS if _is_read_only(nearest) else errno.EACCES)
    if reason:
        raise UsageError(
            f"the folder {path} cannot be written: {nearest}: {reason}",
            hint="name one in a folder that you may write to",
        )


def _is_read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def write_report(path: Path, text: str) -> None:
    """Write *text* to *path* whole or not at all; what is a device or a pipe just takes it.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        beside = _beside(path)
        try:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")
            beside.replace(_whole(path))
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def write_all(reports: Sequence[tuple[Path | None, Callable[[], str]]]) -> list[UsageError]:
    """Write every report that can be written, and return what there is to say of the others.

    Raise that by ``raise_all`` once the screen has shown what may stand nowhere else.
    """
    failed = []
    for path, text in reports:
        if path is not None:
            try:
                write_report(path, text())
            except UsageError as error:
                failed.append(error)
    return failed


def raise_all(failed: Sequence[UsageError]) -> None:
    """Raise all that *failed* as one error.

    Raises:
        UsageError: where anything did.
    """
    if failed:
        raise UsageError("; ".join(error.what for error in failed), hint=failed[0].hint)


def _unwritable(path: Path, error: OSError) -> UsageError:
    what = f"the report {path} cannot be written: {error.strerror or error}"
    return UsageError(what, hint="name a file in a folder that exists and that you may write to")


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
