"""Whether a program does anything: processor time and output of its process group.

Not seen: a program that waits for a GPU by spinning, which uses a whole core.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dflash.diagnose.process_group import PROC, members

IDLE_SHARE = 0.01
"""Of one core: a process that only waits still has threads that wake up to look."""
STACKS_WAIT_S, TICK_S = 2.0, 0.05


class _Done(NamedTuple):
    cpu_s: float
    written: int


class StallWatch:
    """Says when a process group has written nothing and used no processor for ``limit_s``."""

    def __init__(self, group: int, *, limit_s: float) -> None:
        self._group, self._limit_s = group, limit_s
        self._told = False
        self._every_s = min(5.0, limit_s / 10)
        self._looked_at = self._since = time.monotonic()
        self._done = _done_by(group)

    def heard(self) -> None:
        """The program has written something."""
        self._since, self._told = time.monotonic(), False
        self._done = None

    def disturbed(self) -> None:
        """What the program did just now it was asked to do: that is no end of its stall."""
        self._done = _done_by(self._group)

    def has_stalled(self) -> bool:
        """Whether it has now been still for the limit; true once for each time that it is."""
        now = time.monotonic()
        if now - self._looked_at < self._every_s:
            return False
        self._looked_at = now
        done = _done_by(self._group)
        before = self._done
        if done is None or before is None or self._moved(before, done):
            self._since, self._done, self._told = now, done, False
            return False
        if self._told or now - self._since < self._limit_s:
            return False
        self._told = True
        return True

    def _moved(self, before: _Done, done: _Done) -> bool:
        used_s = done.cpu_s - before.cpu_s
        spent_s = time.monotonic() - self._since
        allowed_s = IDLE_SHARE * max(self._limit_s, spent_s)
        return done.written != before.written or not 0 <= used_s <= allowed_s


def ask_for_stacks(folder: Path) -> dict[int, str]:
    """The stacks of all threads of every observed process, by process; what cannot is left out.

    A process is signalled only if it has this folder's file open: whoever became another program,
    or closed its files, is left alone, since SIGUSR1 would end it.
    """
    asked = {}
    for file in folder.glob("*.stacks"):
        pid = int(file.stem)
        if _listens(pid, file):
            asked[pid] = (file, file.stat().st_size)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    return {pid: text for pid, (file, size) in asked.items() if (text := _new_text(file, size))}


def _listens(pid: int, file: Path) -> bool:
    lines = file.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    signals = [line for line in lines if '"kind": "signal"' in line]
    if not signals or '"free": true' not in signals[-1]:
        return False  # the program has a use for the signal
    with suppress(OSError):
        return any(link.readlink() == file for link in (PROC / str(pid) / "fd").iterdir())
    return False


def _new_text(file: Path, size: int) -> str:
    """What is written behind *size*, once it grows no more."""
    deadline, last = time.monotonic() + STACKS_WAIT_S, size
    while time.monotonic() < deadline:
        time.sleep(TICK_S)
        now = file.stat().st_size
        if now == last != size:
            break
        last = now
    return file.read_bytes()[size:].decode(errors="replace")


def _done_by(group: int) -> _Done | None:
    """Processor time and bytes written by the processes of *group* so far; None: not known."""
    found = list(members(group))
    if not found:
        return None
    return _Done(sum(one.cpu_s for one in found), sum(one.written for one in found))
