"""A user's program in a process group of its own: started, signalled, and ended whole."""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from dflash.diagnose import foreground, injected
from dflash.diagnose.child import PR_SET_PDEATHSIG
from dflash.diagnose.process_group import can_be_seen, members
from dflash.errors import UsageError
from dflash.readable import signal_name

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
GRACE_S, TICK_S = 5.0, 0.02
INJECTED = Path(injected.__file__).parent

Process = subprocess.Popen[bytes]


def start(command: Sequence[str], folder: Path, *, stdout: int | None) -> Process:
    """Start *command* with an observer that writes into *folder* if Python runs in it.

    Args:
        command: the program and its arguments; no shell reads them.
        folder: a folder that exists, as an absolute path.
        stdout: file that its output goes to; None: this process's own.

    Raises:
        UsageError: there is no such program, or it cannot be run.
    """
    libc, in_front = ctypes.CDLL(None), foreground.has_terminal()

    def set_up() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # however the watcher ends
        if in_front:
            foreground.take()

    try:
        return subprocess.Popen(  # noqa: S603 - the user's own command
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=_environment(os.environ, folder),
            process_group=0,
            preexec_fn=set_up,  # noqa: PLW1509 - there are no other threads yet
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no program {command[0]!r}",
            hint="after -- comes what you would type without dflash: python train.py ...",
        ) from error
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be run: {error.strerror}",
            hint=f"is it a program? A script of Python's is run by: python {command[0]}",
        ) from error


def _environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """*environment* with the observer in it, and how it was before."""
    before = {name: environment.get(name) for name in ("PYTHONPATH", "PYTHONFAULTHANDLER")}
    path = os.pathsep.join(filter(None, (str(INJECTED), before["PYTHONPATH"])))
    told = json.dumps({"folder": str(folder), "environment": before})
    more = {"DFLASH_WATCH": told, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    return {**environment, **more}


class Signals:
    """Passes signals on to a program's group, those that come before it has started then.

    ``together_s``: two signals of one kind so near to each other are one.
    """

    def __init__(self, *, together_s: float) -> None:
        self.heard: list[str] = []
        self._together_s = together_s
        self._last: dict[int, float] = {}
        self._group: int | None = None
        self._early: list[int] = []

    def go_to(self, group: int) -> None:
        """Signals are for *group* from here on."""
        self._group = group
        for number in self._early:
            _signal_group(group, number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        before, self._last[number] = self._last.get(number), now
        if before is not None and now - before < self._together_s:
            return
        self.heard.append(signal_name(number))
        if self._group is None:
            self._early.append(number)
        else:
            _signal_group(self._group, number)

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Pass signals on inside; what this process ignores it goes on ignoring."""
        numbers = [getattr(signal, name) for name in PASSED_ON]
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: was for number, was in before.items() if was != signal.SIG_IGN}
        try:
            for number in before:
                signal.signal(number, self._pass_on)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def end_group(process: Process, first: signal.Signals, *, meanwhile: Callable[[], object]) -> bool:
    """End the program's group: *first*, and GRACE_S later SIGKILL. Whether there was any of it.

    ``meanwhile`` is called over and over until all of it has ended, or cannot be: one that waits
    for a broken device is not waited for.
    """
    if not group_lives(process):
        return False
    _signal_group(process.pid, first)
    killed_at = time.monotonic() + GRACE_S
    while group_lives(process) and time.monotonic() < killed_at + GRACE_S:
        if time.monotonic() > killed_at:
            _signal_group(process.pid, signal.SIGKILL)
        meanwhile()
        time.sleep(TICK_S)
    return True


def group_lives(process: Process) -> bool:
    """Whether any process of the group still runs."""
    if process.poll() is None:
        return True
    if can_be_seen():  # else one that has ended, and whose parent never asks, would count
        return any(members(process.pid))
    return _signal_group(process.pid, 0)


def _signal_group(group: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False
