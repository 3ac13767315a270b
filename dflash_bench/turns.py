"""Subjects in processes of their own that take turns, so that drift of the machine hits all alike.

A subject that raises, crashes or hangs ends its own process and becomes a ``Failure``; the others
go on. Knows nothing of what is measured.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Protocol, Self

Facts = dict[str, Any]
Order = Literal["build", "prepare", "turn", "finish"]
END_S = 5.0


class Subject(Protocol):
    """What one process measures; everything it returns is picklable."""

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
    """How a subject ended before its time. ``during`` is the order that it did not carry out."""

    type: str
    message: str
    during: Order
    trace: str = ""


class Child:
    """One subject in one process, as the process that measures sees it.

    ``prepared_s`` runs from just before the process is started to the end of its first step, less
    the time in which it waited for its turn to prepare. An answer that takes longer than
    ``limit_s`` is a hang.
    """

    def __init__(self, name: str, make: Callable[[], Subject], *, limit_s: float) -> None:
        self.name = name
        self.turns: list[list[float]] = []
        self.facts: Facts = {}
        self.failure: Failure | None = None
        self.prepared_s = 0.0
        self._started_at = 0.0
        self.limit_s = limit_s
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._theirs, make), name=name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive()

    def start(self) -> None:
        """Start the process and let it build, without waiting for it."""
        self._started_at = time.time()
        self._process.start()
        self._theirs.close()
        self._send("build")

    def prepare(self) -> None:
        """Wait until the subject is built, and then until it has made its first step."""
        built = self._receive("build")
        if built is None:
            return
        self.facts |= built[1]
        asked_at = time.time()
        prepared = self._ask("prepare")
        if prepared is not None:
            self.facts |= prepared[1]
            self.prepared_s = built[0] - self._started_at + prepared[0] - asked_at

    def turn(self) -> None:
        """Let the subject run some steps."""
        answer = self._ask("turn")
        if answer is not None:
            self.turns.append(answer[1])

    def finish(self) -> None:
        """Ask for what is known at the end, and end the process."""
        answer = self._ask("finish")
        if answer is not None:
            self.facts |= answer[1]
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()  # it ends by itself when it is waiting for the next order
        if self._process.pid is None:
            self._theirs.close()
            return
        self._process.join(END_S if self.failure is None else 0.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, order: Order) -> tuple[float, Any] | None:
        self._send(order)
        return self._receive(order)

    def _send(self, order: Order) -> None:
        if self.failure is None:
            with suppress(OSError):  # it has died, as receiving will show
                self._pipe.send(order)

    def _receive(self, order: Order) -> tuple[float, Any] | None:
        """When the answer was given, and the answer; None once there is a failure."""
        if self.failure is not None:
            return None
        try:
            if not self._pipe.poll(self.limit_s):
                self.failure = Failure("Hang", f"no answer within {self.limit_s:g} s", order)
                self._process.kill()
                return None
            answer: tuple[float, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            self.failure = Failure("ProcessDied", _ending(self._process.exitcode), order)
            return None
        if isinstance(answer[1], Failure):
            self.failure = answer[1]
            return None
        return answer


def take_turns(children: Sequence[Child], *, num_turns: int, say: Callable[[str], None]) -> None:
    """Make all ready one after another, let them take turns A B B A ..., and finish all.

    Each starts and builds while the one before it compiles.
    """
    children[0].start()
    for child, following in zip(children, [*children[1:], None], strict=True):
        if following is not None:
            following.start()
        say(f"{child.name}: making ready")
        child.prepare()
        say(f"{child.name}: {_state(child)}")
    for number in range(num_turns):
        for child in children if number % 2 == 0 else reversed(children):
            child.turn()
        say(f"turn {number + 1} of {num_turns}")
    for child in children:
        child.finish()
        say(f"{child.name}: {_state(child)}")


def _state(child: Child) -> str:
    if child.failure is not None:
        return f"{child.failure.type} during {child.failure.during}: {child.failure.message}"
    return "done" if child.turns else f"ready {child.prepared_s:.1f} s after its start"


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe and goes on"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _serve(pipe: Connection, make: Callable[[], Subject]) -> None:
    """Carry out orders until the pipe closes; runs in the child."""
    os.dup2(2, 1)  # results on stdout are the parent's to print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends us
    subject: Subject | None = None
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            sys.stderr.flush()
            os._exit(0)  # an orderly end with compilers, graphs and pools takes seconds
        try:
            subject = subject or make()
            answer = getattr(subject, order)()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a row of the table
            message = next(iter(str(error).splitlines()), "")
            trace = "".join(traceback.format_exception(error))
            answer = Failure(type(error).__name__, message, order, trace)
        pipe.send((time.time(), answer))
        if isinstance(answer, Failure):
            return
