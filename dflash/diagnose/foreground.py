"""Which processes the terminal's keys go to while a program runs in a group of its own."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STDIN = 0


def has_terminal() -> bool:
    """Whether this process may read from the terminal now, so that a program of its may."""
    try:
        return os.isatty(STDIN) and os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:
        return False


def take() -> None:
    """Give the terminal to the calling process's own group."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which would stop who is not in front
    try:
        os.tcsetpgrp(STDIN, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)


def give(group: int) -> None:
    """Give the terminal, which this process has, to *group*."""
    os.tcsetpgrp(STDIN, group)


@contextmanager
def returned(*, taken: bool) -> Iterator[None]:
    """Have the terminal back afterwards, if a child has *taken* it."""
    try:
        yield
    finally:
        if taken:
            take()


def has_stopped(pid: int) -> bool:
    """Whether the child was stopped, by Ctrl-Z say, since this was asked last."""
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:
        return False
    return found is not None


def stop_with(group: int) -> None:
    """Stop as the program did, so that the shell has its terminal; go on together with it."""
    take()
    os.kill(os.getpid(), signal.SIGSTOP)
    if has_terminal():  # else it goes on in the background
        give(group)
    os.killpg(group, signal.SIGCONT)
