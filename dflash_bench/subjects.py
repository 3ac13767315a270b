"""What one process measures, and how it carries out orders there.

Knows nothing of what is measured, and nothing of the process that gives the orders
(``dflash_bench.turns``).
"""

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

from dflash.diagnose.child import stay_with

Facts = dict[str, Any]
Order = Literal["load", "build", "prepare", "settle", "turn", "bare", "so_far", "finish"]


class Subject(Protocol):
    """What one process measures; everything it returns is picklable.

    It is made, with all that this imports, before it is to build. It may have three methods more.
    ``settle`` runs untimed steps after ``prepare``, alone on the device, and returns their
    milliseconds; ``bare`` is a turn without measuring its steps one by one, the mean step of which
    it returns. ``so_far`` tells what is known by now, and takes no time and changes nothing: it is
    asked when a bench is interrupted, and when an order has failed.
    """

    def build(self) -> Facts:
        """Make what is measured; others may be using the device meanwhile."""

    def prepare(self) -> Facts:
        """Compile and warm up, up to the end of the first step; nobody else uses the device."""

    def turn(self) -> list[float]:
        """Run some steps; the milliseconds of each."""

    def finish(self) -> Facts:
        """What is known at the end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a subject ended before its time.

    Attributes:
        during: the order that it did not carry out.
        known: what it could still tell.
    """

    type: str
    message: str
    during: Order
    trace: str = ""
    known: Facts = field(default_factory=dict)


def known_of(subject: object) -> Facts:
    """What *subject* knows by now; nothing where it cannot tell."""
    with suppress(Exception):
        return dict(getattr(subject, "so_far", dict)())
    return {}


def serve(pipe: Connection, make: Callable[[], Subject], *, stacks: Path, parent: int) -> None:
    """Carry out orders until the pipe closes; runs in the child."""
    _leave_signals_to_the_parent()
    stay_with(parent)
    os.dup2(2, 1)  # results on stdout are the parent's to print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stacks.open("w"), all_threads=True)
    subject: Subject | None = None
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):  # reset, where the parent left an answer unread
            sys.stderr.flush()
            os._exit(0)  # an orderly end with compilers, graphs and pools takes seconds
        answer: Any
        try:
            subject = subject or make()
            answer = known_of(subject) if order == "so_far" else _carry_out(subject, order)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a row of the table
            message = next(iter(str(error).splitlines()), "")
            trace = "".join(traceback.format_exception(error))
            answer = Failure(type(error).__name__, message, order, trace, known_of(subject))
        with suppress(OSError):  # nobody waits for it any more
            pipe.send((time.time(), order, answer))
        if isinstance(answer, Failure):
            return


def _carry_out(subject: Subject, order: Order) -> Any:  # noqa: ANN401 - as the order
    """What *subject* answers; None to an order that it need not know."""
    method = getattr(subject, order, None)
    return None if method is None else method()


def _leave_signals_to_the_parent() -> None:
    """Go on when the terminal, or ``timeout``, ends the whole group: the parent asks, and ends it.

    SIGTERM is caught and not ignored, since programs that are started from here would inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
