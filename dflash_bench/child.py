"""One subject in one process, as the process that measures sees it.

A subject that raises, crashes or hangs ends its own process and becomes a ``Failure``. Knows
nothing of what is measured, nor of others beside it (``dflash_bench.turns``).
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash.readable import signal_name
from dflash_bench.quiet_start import interrupts_held_back
from dflash_bench.subjects import Facts, Failure, Order, Subject, serve

END_S = 5.0
STACKS_S = 3.0
"""Between SIGABRT, at which a hanging child writes the stacks of its threads, and SIGKILL."""

STACKS_CHARS = 12_000


class Child:
    """One subject in one process, as the process that measures sees it.

    ``prepared_s`` runs from just before the process is started to the end of its first step, less
    the time in which it waited for its turn to build and to prepare. An answer that takes longer
    than ``limit_s`` is a hang.
    """

    def __init__(self, name: str, make: Callable[[], Subject], *, limit_s: float) -> None:
        self.name = name
        self.turns: list[list[float]] = []
        self.facts: Facts = {}
        self.failure: Failure | None = None
        self.prepared_s = 0.0
        self.limit_s = limit_s
        self._started_at = 0.0
        self._loaded_at = 0.0
        self._build_asked_at = 0.0
        self._reading = False
        self._extra = False
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        handle, stacks = tempfile.mkstemp(prefix="dflash-bench-", suffix=".stacks")
        self._stacks = os.fdopen(handle, encoding="utf-8", errors="replace")
        self._stacks_at = Path(stacks)
        self._process = context.Process(
            target=serve,
            args=(self._theirs, make),
            kwargs={"stacks": self._stacks_at, "parent": os.getpid()},
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
        """Start the process, once, and let it import what it needs, without waiting for it."""
        if self.pid is not None:
            return
        self._started_at = time.time()
        with interrupts_held_back():  # for good in the child: the parent ends it
            self._process.start()
        self._theirs.close()
        self._send("load")

    def load(self) -> None:
        """Wait until it has imported what it needs: it then does nothing until it is to build."""
        if self.failure is None and not self._loaded_at:
            self._loaded_at = self._receive("load")[0]

    def build(self) -> None:
        """Let the process build, without waiting for it."""
        self._build_asked_at = time.time()
        self._send("build")

    def prepare(self) -> None:
        """Wait until the subject is built, and then until it has made its first step."""
        self.load()
        if not self._build_asked_at:
            self.build()
        built_at = self._receive("build")[0]
        asked_at = time.time()
        prepared_at = self._ask("prepare")[0]
        if self.failure is None:
            began_at = max(self._loaded_at, self._build_asked_at)
            waited_s = began_at - self._loaded_at + asked_at - built_at
            self.prepared_s = prepared_at - self._started_at - waited_s

    def settle(self) -> None:
        """Let the subject run the steps that it leaves untimed."""
        self._ask("settle")

    def bare(self) -> float | None:
        """Milliseconds of a step that is measured as little as can be; None if it has no such."""
        found: float | None = self._ask("bare")[1]
        return found

    def restart(self) -> None:
        """Let the subject's next turn be made of what its first was."""
        self._ask("restart")

    def turn(self) -> None:
        """Let the subject run some steps."""
        self._ask("turn")

    def extra_turn(self) -> list[float]:
        """The times of a turn that is none of its turns: nobody else had one beside it; [] if it
        failed."""
        self._extra = True  # after an interrupt too, when the answer is taken by somebody else
        times_ms: list[float] | None = self._ask("turn")[1]
        self._extra = False
        return times_ms or []

    def finish(self) -> None:
        """Ask for what is known at the end, and end the process."""
        self._ask("finish")
        self.close()

    @property
    def can_tell(self) -> bool:
        """Whether it is there, and past its first step."""
        whole = not (self._pipe.closed or self._reading)
        return whole and self.failure is None and self.prepared_s > 0

    def ask_so_far(self) -> None:
        """Ask for what is known by now, behind whatever it is doing; nobody waits."""
        with suppress(OSError):
            self._pipe.send("so_far")

    def take_so_far(self, *, until: float) -> None:
        """Take the answer to that, and before it to what it was doing; give up at *until*."""
        answered = ""
        while answered != "so_far":
            try:
                if not self._pipe.poll(max(0.0, until - time.monotonic())):
                    return
                _, answered, answer = self._pipe.recv()
            except (EOFError, OSError):
                return
            self._keep(answered, answer)

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
        self._stacks.close()
        self._stacks_at.unlink(missing_ok=True)

    def _ask(self, order: Order) -> tuple[float, Any]:
        self._send(order)
        return self._receive(order)

    def _send(self, order: Order) -> None:
        if self.failure is None:
            with suppress(OSError):  # it has died, as receiving will show
                self._pipe.send(order)

    def _receive(self, order: Order) -> tuple[float, Any]:
        """When the answer was given, and the answer; nought and None once there is a failure."""
        if self.failure is not None:
            return 0.0, None
        try:
            if not self._pipe.poll(self.limit_s):
                message = f"no answer within {self.limit_s:g} s"
                self.failure = Failure("Hang", message, order, self._last_stacks())
                return 0.0, None
            self._reading = True  # an interrupt in the middle leaves half an answer in the pipe
            answered_at, _, answer = self._pipe.recv()
            self._reading = False
        except (EOFError, OSError):
            self._process.join(END_S)
            message = _ending(self._process.exitcode)
            self.failure = Failure("ProcessDied", message, order, self._last_stacks())
            return 0.0, None
        self._keep(order, answer)
        return (0.0, None) if self.failure is not None else (answered_at, answer)

    def _keep(self, order: str, answer: Any) -> None:  # noqa: ANN401 - as the order
        if isinstance(answer, Failure):
            self.failure = answer
            self.facts |= answer.known
        elif order == "turn" and not answer:
            self.failure = Failure("ValueError", "a turn without a step", "turn")
        elif order == "turn":
            if not self._extra:
                self.turns.append(answer)
        elif order == "settle":
            self.facts.setdefault("first_steps_ms", []).extend(answer or [])
        elif order not in ("bare", "load", "restart"):
            self.facts |= answer

    def _last_stacks(self) -> str:
        """End the process, if it has not ended; the stacks that it leaves."""
        with suppress(OSError):
            if self._process.is_alive() and self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGABRT)
                self._process.join(STACKS_S)
        self._process.kill()
        self._stacks.seek(0)
        return self._stacks.read(STACKS_CHARS)


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
        return f"killed by {signal_name(-exit_code)}"
    return f"exit code {exit_code}"
