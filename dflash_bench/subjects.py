"""What one process measures, and how it carries out orders there.

Knows nothing of what is measured, and nothing of the process that gives the orders
(``dflash_bench.child``).
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
from dflash.diagnose.launch import MEMORY
from dflash.errors import DeviceMemoryError

Facts = dict[str, Any]
Order = Literal["load", "build", "prepare", "settle", "restart", "turn", "bare", "so_far", "finish"]


class Subject(Protocol):
    """What one process measures; everything it returns is picklable.

    It is made, with all that this imports, before it is to build. It may have four methods more.
    ``settle`` runs untimed steps after ``prepare``, alone on the device, and returns their
    milliseconds; ``restart`` lets the next turn be made of what the first was; ``bare`` is a turn
    without measuring its steps one by one, the mean step of which it returns. ``so_far`` tells what
    is known by now, and takes no time and changes nothing: it is asked when a bench is interrupted,
    and when an order has failed.
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
        out_of_memory: it was short of memory, of a device or the host.
    """

    type: str
    message: str
    during: Order
    trace: str = ""
    known: Facts = field(default_factory=dict)
    out_of_memory: bool = False


def known_of(subject: object) -> Facts:
    """What *subject* knows by now; nothing where it cannot tell."""
    with suppress(Exception):
        return dict(getattr(subject, "so_far", dict)())
    return {}


def failure_of(error: BaseException, during: Order, *, known: Facts) -> Failure:
    """What *error* makes of the order that it ended."""
    return Failure(
        type(error).__name__,
        next(iter(str(error).splitlines()), ""),
        during,
        "".join(traceback.format_exception(error)),
        known,
        out_of_memory=any(map(_lacks_memory, _chain(error))),
    )


def _chain(error: BaseException) -> list[BaseException]:
    """*error* and all that it came of."""
    found: list[BaseException] = []
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        each = open_ends.pop()
        if each is not None and each not in found:
            found.append(each)
            open_ends += [each.__cause__, each.__context__]
    return found


def _lacks_memory(error: BaseException) -> bool:
    """Whether *error* by itself says so; torch's own is known by its name."""
    if isinstance(error, DeviceMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or any(words in text for words in MEMORY)


def serve(pipe: Connection, make: Callable[[], Subject], *, stacks: Path, parent: int) -> None:
    """Carry out orders until the pipe closes; runs in the child."""
    _leave_signals_to_the_parent()
    stay_with(parent)
    os.dup2(2, 1)  # results on stdout are the parent's to print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stacks.open("w"), all_threads=True)
    stacks.unlink(missing_ok=True)  # the parent has it open too: nothing is left if both are killed
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
            answer = failure_of(error, order, known=known_of(subject))
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
