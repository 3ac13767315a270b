"""The moment between warm-up and running: workers enter one at a time, and only then all start."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash.pipeline.lifeline import TICK_S, Lifeline


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Opening:
    """What happens first, in this order and one after another.

    Attributes:
        enter: of every drafter, in its own thread.
        prime: of every target, in its own thread: what a thread makes on its first use of a device
            (a cuBLAS handle with its workspace) is made before anything is sealed.
        then: once, when everybody has entered.
    """

    enter: Sequence[Callable[[], None]] = field(default=())
    prime: Sequence[Callable[[], None]] = field(default=())
    then: Callable[[], None] = _nothing


class Gate:
    """Holds every thread of a run until all drafters, and the targets to prime, have entered.

    Who enters may compile, capture or compare a replay, which no other thread must disturb by using
    a device. How long that takes is nobody's hang, so the watchdog is told.
    """

    def __init__(self, opening: Opening, num_drafters: int, life: Lifeline) -> None:
        enter = opening.enter or [_nothing] * num_drafters
        self._turns = [*enter, *opening.prime]
        self._num_drafters = num_drafters
        self._then = opening.then
        self._life = life
        self._turn = 0
        self._changed = threading.Condition()
        self._opened_s: float | None = None

    @property
    def open_s(self) -> float:
        """Seconds since the gate was opened in which the run was not paused."""
        return 0.0 if self._opened_s is None else self._life.steps_s - self._opened_s

    def held(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return *body* for a thread that starts when all have entered."""

        def work() -> None:
            self._wait(lambda: self._opened_s is not None)
            body()

        return work

    def entered(self, drafter: int, body: Callable[[], None]) -> Callable[[], None]:
        """Return *body* for the thread of *drafter*, which enters and waits for the others."""
        return self._in_turn(drafter, self.held(body))

    def primed(self, target: int, body: Callable[[], None]) -> Callable[[], None]:
        """Return *body* for the thread of *target*, which enters too if it is to be primed."""
        turn = self._num_drafters + target
        return self._in_turn(turn, self.held(body)) if turn < len(self._turns) else self.held(body)

    def _in_turn(self, turn: int, body: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            self._wait(lambda: self._turn == turn)
            with self._life.excused():
                self._turns[turn]()
                self._pass_on()
            body()

        return work

    def _pass_on(self) -> None:
        last = self._turn + 1 == len(self._turns)
        if last:
            self._then()
        with self._changed:
            self._turn += 1
            if last:
                self._opened_s = self._life.steps_s
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool]) -> None:
        self._life.check()
        with self._changed:
            while not self._changed.wait_for(over, TICK_S):
                self._life.check()
