"""Ending early and keeping what was found."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED_EXIT = 130  # 128 + SIGINT, as shells report it

TOGETHER_S = 1.0
"""``timeout`` signals a program and then its whole group: two so near to each other are one."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt inside for SIGTERM too, which ``timeout`` and job schedulers send.

    What ignores a signal, as a job in the background does Ctrl-C, goes on ignoring it.
    """
    last = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > TOGETHER_S:
            signal.default_int_handler(number, frame)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
