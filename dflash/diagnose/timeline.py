"""Marks that a child leaves behind: which thread did what, and when.

Each mark is a line of its own in a file, written at once, so that those before a crash survive it.
Outside of a child, and in production code that is asked by nobody, ``mark`` does nothing.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

Kind = Literal["compile", "capture", "replay", "cuda", "memory", "fail", "note"]
"""What happened. A mark of "memory" belongs to a curve: its detail is ``series`` (a name), ``step``
and numbers of bytes such as ``reserved`` and ``allocated``. A detail ``for_s`` says that what
happened took so long, and ended at the mark."""

_file: int | None = None


def start(path: Path) -> None:
    """Write the marks of this process to *path* from here on."""
    global _file  # noqa: PLW0603 - the marks of a process have one place
    _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(kind: Kind, **detail: Any) -> None:  # noqa: ANN401 - anything that JSON or str() can say
    """Note that *kind* happens in this thread now."""
    if _file is None:
        return
    line = {
        "kind": kind,
        "thread": threading.current_thread().name,
        "ns": time.monotonic_ns(),
        "detail": detail,
    }
    os.write(_file, json.dumps(line, default=str).encode() + b"\n")
