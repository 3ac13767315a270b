"""Runs a user's own program, passes on what it says, and keeps what tells how it fared.

Not here: what any of that means (``verdicts``). Torch is not imported.
"""

import os
import select
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.diagnose import foreground
from dflash.diagnose.findings import Stall, WatchDiagnosis
from dflash.diagnose.observed import Observed, read_observed
from dflash.diagnose.process_group import can_be_seen
from dflash.diagnose.program import Process, Signals, end_group, group_lives, start
from dflash.diagnose.stall import StallWatch, ask_for_stacks
from dflash.errors import UsageError
from dflash.readable import signal_name

STDERR = 2
TICK_S, LINGER_S = 0.1, 2.0
KEPT_BYTES = 4 << 20
"""Of stderr: as much of its beginning, and as much of its end."""
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to watch.

    Attributes:
        stall_s: seconds without output and processor time that are a stall.
        kill_on_stall: end the program then.
        stdout: file that the program's output goes to; None: where this process's goes.
        together_s: two signals of one kind within so many seconds are passed on as one.
    """

    stall_s: float = 300.0
    kill_on_stall: bool = False
    stdout: int | None = None
    together_s: float = 0.0


@dataclass(slots=True)
class Watched:
    """What is known of a program that has ended. ``code`` is negative where a signal ended it."""

    command: list[str]
    code: int = 0
    stderr: str = ""
    lost_bytes: int = 0
    wall_s: float = 0.0
    stalls: list[Stall] = field(default_factory=list)
    ended_for_stall: bool = False
    left_behind: bool = False
    signals: list[str] = field(default_factory=list)
    processes: list[Observed] = field(default_factory=list)

    def undiagnosed(self, why: str) -> WatchDiagnosis:
        """How it ended, where *why* keeps anybody from saying what it suffered from."""
        return WatchDiagnosis(**self.end, suffered=[], undiagnosed=why)

    @property
    def end(self) -> dict[str, Any]:
        """How it ended, as a diagnosis has it."""
        failed = [one for process in self.processes for one in process.failed]
        return {
            "command": self.command,
            "exit_code": self.code if self.code >= 0 else None,
            "signal": signal_name(-self.code) if self.code < 0 else "",
            "ended_for_stall": self.ended_for_stall,
            "wall_s": self.wall_s,
            "stalls": self.stalls,
            "died": [f"{one.thread}: {one.text.rstrip().rpartition(chr(10))[2]}" for one in failed],
        }


def watch(
    command: Sequence[str], *, plan: Plan, talk: Callable[[str], None] = lambda _text: None
) -> Watched:
    """Run *command* to its end; nothing of its process group outlives this call.

    ``talk`` is told at once of a stall.

    Raises:
        UsageError: there is no command, or it cannot be started.
    """
    if not command:
        raise UsageError(
            "dflash diagnose watch needs a program to watch",
            hint="dflash diagnose watch -- python train.py ...",
        )
    begun_s, signals = time.monotonic(), Signals(together_s=plan.together_s)
    with tempfile.TemporaryDirectory(prefix="dflash-watch-") as name:
        folder = Path(name).resolve()
        in_front = foreground.has_terminal()
        with signals.passed_on(), foreground.returned(taken=in_front):
            process = start(command, folder, stdout=plan.stdout)
            signals.go_to(process.pid)
            watching = _Watching(process, folder, plan=plan, talk=talk)
            try:
                watching.run(in_front=in_front)
            finally:
                end_group(process, signal.SIGKILL, meanwhile=watching.listen)
                watching.close()
        found = watching.found
        found.processes = read_observed(folder, begun_s=begun_s)
    found.command, found.signals = list(command), signals.heard
    found.code, found.wall_s = process.wait(), round(time.monotonic() - begun_s, 3)
    found.stderr, found.lost_bytes = watching.heard.text()
    return found


class _Heard:
    """The beginning and the end of what a program wrote."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), deque[bytes]()
        self._num_tail = self._lost = 0

    def add(self, chunk: bytes) -> None:
        room = KEPT_BYTES - len(self._head)
        self._head += chunk[:room]
        if len(chunk) > room:
            self._tail.append(chunk[room:])
            self._num_tail += len(chunk) - room
        while self._num_tail - len(self._tail[0] if self._tail else b"") > KEPT_BYTES:
            gone = len(self._tail.popleft())
            self._num_tail, self._lost = self._num_tail - gone, self._lost + gone

    def text(self) -> tuple[str, int]:
        """The text, and how many bytes of its middle are not in it."""
        between = b"\n" if self._lost else b""
        return (bytes(self._head) + between + b"".join(self._tail)).decode(
            errors="replace"
        ), self._lost


class _Watching:
    def __init__(
        self, process: Process, folder: Path, *, plan: Plan, talk: Callable[[str], None]
    ) -> None:
        self.found, self.heard = Watched([]), _Heard()
        self._process, self._folder, self._plan, self._talk = process, folder, plan, talk
        self._begun_s = time.monotonic()
        self._stall = StallWatch(process.pid, limit_s=plan.stall_s) if can_be_seen() else None
        self._pipe = process.stderr.fileno() if process.stderr else None

    def run(self, *, in_front: bool) -> None:
        """Listen until the program has ended, and then to what it left behind."""
        process = self._process
        while process.poll() is None:
            self.listen()
            if in_front and foreground.has_stopped(process.pid):
                foreground.stop_with(process.pid)
                self._moves()
            if self._stall and self._stall.has_stalled():
                self._tell_stall()
                self._stall.disturbed()
        until = time.monotonic() + LINGER_S
        while group_lives(process) and time.monotonic() < until:
            self.listen()
        if group_lives(process):
            self.found.left_behind = True
            end_group(process, signal.SIGTERM, meanwhile=self.listen)
        while self.listen():
            pass

    def listen(self) -> bool:
        """Pass on what the program has written, as it comes; whether there was something."""
        if self._pipe is None:
            time.sleep(TICK_S)
            return False
        if not select.select([self._pipe], [], [], TICK_S)[0]:
            return False
        chunk = os.read(self._pipe, READ_BYTES)
        if not chunk:
            self._pipe = None
            return False
        self.heard.add(chunk)
        self._moves()
        try:
            while chunk:
                chunk = chunk[os.write(STDERR, chunk) :]
        except BrokenPipeError:  # nobody reads us any more, so nobody shall read the program
            self.close()
        return True

    def close(self) -> None:
        """Listen no more."""
        self._pipe = None
        if self._process.stderr:
            self._process.stderr.close()

    def _moves(self) -> None:
        if self._stall:
            self._stall.heard()

    def _tell_stall(self) -> None:
        stacks = ask_for_stacks(self._folder)
        at_s = round(time.monotonic() - self._begun_s, 3)
        told = "\n".join(f"process {pid}:\n{text.strip()}" for pid, text in stacks.items())
        self.found.stalls.append(Stall(at_s=at_s, still_s=self._plan.stall_s, stacks=told))
        how = "these are the stacks of its threads" if told else "its threads cannot be seen"
        self._talk(f"watch: no output and no work for {self._plan.stall_s:g} s; {how}")
        if told:
            self._talk(told)
        if self._plan.kill_on_stall:
            self.found.ended_for_stall = True
            end_group(self._process, signal.SIGABRT, meanwhile=self.listen)
