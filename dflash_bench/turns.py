"""Subjects in processes of their own that take turns, so that drift of the machine hits all alike.

A subject that raises, crashes or hangs ends its own process and becomes a ``Failure``; the others
go on. Knows nothing of what is measured.
"""

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from dflash.diagnose.child import stay_with
from dflash_bench.quiet_start import interrupts_held_back

Facts = dict[str, Any]
Order = Literal["build", "prepare", "settle", "turn", "bare", "finish"]
END_S = 5.0
STACKS_S = 3.0
"""Between SIGABRT, at which a hanging child writes the stacks of its threads, and SIGKILL."""

STACKS_CHARS = 12_000


class Subject(Protocol):
    """What one process measures; everything it returns is picklable.

    It may have two methods more, both of which return milliseconds: ``settle`` runs untimed steps
    after ``prepare``, alone on the device; ``bare`` is a turn without measuring its steps one by
    one, the mean step of which it returns.
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
        handle, stacks = tempfile.mkstemp(prefix="dflash-bench-", suffix=".stacks")
        os.close(handle)
        self._stacks = Path(stacks)
        self._process = context.Process(
            target=_serve,
            args=(self._theirs, make),
            kwargs={"stacks": self._stacks, "parent": os.getpid()},
            name=name,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(at_once=kind is not None)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        """Of its process, once it is started."""
        return self._process.pid

    def start(self) -> None:
        """Start the process and let it build, without waiting for it."""
        self._started_at = time.time()
        with interrupts_held_back():  # for good in the child: the parent ends it
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

    def settle(self) -> None:
        """Let the subject run the steps that it leaves untimed."""
        answer = self._ask("settle")
        if answer is not None and answer[1] is not None:
            self.facts.setdefault("first_steps_ms", []).extend(answer[1])

    def bare(self) -> float | None:
        """Milliseconds of a step that is measured as little as can be; None if it has no such."""
        answer = self._ask("bare")
        return None if answer is None else answer[1]

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

    def close(self, *, at_once: bool = False) -> None:
        """End the process, whatever it does."""
        self._pipe.close()  # it ends by itself when it is waiting for the next order
        if self._process.pid is None:
            self._theirs.close()
        else:
            self._process.join(0.0 if at_once or self.failure is not None else END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._stacks.unlink(missing_ok=True)

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
                message = f"no answer within {self.limit_s:g} s"
                self.failure = Failure("Hang", message, order, self._last_stacks())
                return None
            answer: tuple[float, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            message = _ending(self._process.exitcode)
            self.failure = Failure("ProcessDied", message, order, self._last_stacks())
            return None
        if isinstance(answer[1], Failure):
            self.failure = answer[1]
            return None
        return answer

    def _last_stacks(self) -> str:
        """End the process, if it has not ended; the stacks that it leaves."""
        with suppress(OSError):
            if self._process.is_alive() and self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGABRT)
                self._process.join(STACKS_S)
        self._process.kill()
        return self._stacks.read_text(encoding="utf-8", errors="replace")[:STACKS_CHARS]


def make_ready(children: Sequence[Child], *, say: Callable[[str], None]) -> None:
    """Make all ready one after another; each starts and builds while the one before compiles."""
    if children:
        children[0].start()
    for child, following in zip(children, [*children[1:], None], strict=True):
        if following is not None:
            following.start()
        say(f"{child.name}: making ready")
        child.prepare()
        child.settle()
        say(f"{child.name}: {state_of(child)}")


def take_turns(
    children: Sequence[Child], *, enough: Callable[[int], bool], say: Callable[[str], None]
) -> int:
    """Let children that are ready take turns, A B B A ..., until *enough* says so; return how many.

    *enough* is asked after every round, with their number. Ends too when all have failed.
    """
    for number in count():
        if all(child.failure is not None for child in children) or enough(number):
            return number
        for child in children if number % 2 == 0 else reversed(children):
            child.turn()
        say(f"turn {number + 1}")
    raise AssertionError


def state_of(child: Child) -> str:
    """What has become of *child*, in a few words."""
    if child.failure is not None:
        return f"{child.failure.type} during {child.failure.during}: {child.failure.message}"
    if child.turns:
        return f"done, {len(child.turns)} turns"
    return f"ready {child.prepared_s:.1f} s after its start"


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe and goes on"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _serve(pipe: Connection, make: Callable[[], Subject], *, stacks: Path, parent: int) -> None:
    """Carry out orders until the pipe closes; runs in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stay_with(parent)
    os.dup2(2, 1)  # results on stdout are the parent's to print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stacks.open("w"), all_threads=True)
    subject: Subject | None = None
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            sys.stderr.flush()
            os._exit(0)  # an orderly end with compilers, graphs and pools takes seconds
        try:
            subject = subject or make()
            answer = getattr(subject, order, _nothing)()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a row of the table
            message = next(iter(str(error).splitlines()), "")
            trace = "".join(traceback.format_exception(error))
            answer = Failure(type(error).__name__, message, order, trace)
        pipe.send((time.time(), answer))
        if isinstance(answer, Failure):
            return


def _nothing() -> None:
    """What a subject answers to an order that it need not know."""
