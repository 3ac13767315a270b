"""The file a bug of ours leaves behind: what was called, with which versions, and the traceback."""

import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from dflash import __version__

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "typer", "rich")


def report_crash(error: Exception, argv: Sequence[str]) -> None:
    """Write the crash file and name it in one sentence; without any place for it, print it."""
    text = crash_text(error, argv)
    name = f"dflash-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    summary = f"error: internal error, {type(error).__name__}: {error}"
    for folder in _places(argv):
        beside = folder / f"{name}.partial"
        try:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")
            beside.replace(folder / name)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            continue
        print(f"{summary}; its traceback is in {folder / name}", file=sys.stderr)
        print("hint: this is a bug in dflash; please report it with that file", file=sys.stderr)
        return
    print(f"{summary}; no folder takes a crash file, so here it is:\n{text}", file=sys.stderr)


def crash_text(error: Exception, argv: Sequence[str]) -> str:
    versions = [f"dflash {__version__}", f"python {platform.python_version()}"]
    versions += [f"{package} {_version(package)}" for package in PACKAGES]
    return "\n".join(
        [
            f"command: {shlex.join(['dflash', *argv])}",
            f"folder: {Path.cwd()}",
            f"platform: {platform.platform()}",
            f"versions: {', '.join(versions)}",
            "",
            *(line.rstrip("\n") for line in traceback.format_exception(error)),
            "",
        ]
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _places(argv: Sequence[str]) -> Iterator[Path]:
    """The run folder if the command names one that exists, here, the folder for temporary files."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, sign, value = word.partition("=")
        if name == "--run-dir" and Path(value if sign else following).is_dir():
            yield Path(value if sign else following)
    yield Path()
    yield Path(tempfile.gettempdir())
