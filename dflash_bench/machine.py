"""The commit that a figure was measured at, and how a bench talks."""

import subprocess
import sys
from pathlib import Path


def commit() -> str | None:
    """The commit of the working tree that this is a file of, "+" after it when changed; or None."""
    folder = Path(__file__).parent
    try:
        top, head, changes = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603, S607
            for words in (
                ["rev-parse", "--show-toplevel"],
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "-uno"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    if Path(top.stdout.strip()).resolve() != folder.parent.resolve():
        return None  # installed somewhere inside of another project
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def say(text: str) -> None:
    """Tell of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
