"""The moment between warm-up and running: drafters enter one at a time, and only then all start."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash.pipeline.lifeline import TICK_S, Lifeline


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Opening:
    """What happens first: ``enter`` of every drafter in its own thread, then ``then`` once."""

    enter: Sequence[Callable[[], None]] = field(default=())
    then: Callable[[], None] = _nothing


class Gate:
    """Holds every thread of a run until all drafters have entered.

    A drafter that enters may compile, capture or compare a replay, which no other thread must
    disturb by using a device. How long that takes is nobody's hang, so the watchdog is told.
    """

    def __init__(self, opening: Opening, num_drafters: int, life: Lifeline) -> None:
        self._opening = opening
        self._missing = num_drafters
        self._life = life
        self._one_at_a_time = threading.Lock()
        self._open = threading.Event()
        self._opened_s = 0.0

    @property
    def open_s(self) -> float:
        """Seconds since the gate was opened."""
        return time.perf_counter() - self._opened_s if self._open.is_set() else 0.0

    def held(self, body: Callable[[], None]) -> Callable[[], None]:
        """Return *body* for a thread that starts when all drafters have entered."""

        def work() -> None:
            self._wait()
            body()

        return work

    def entered(self, drafter: int, body: Callable[[], None]) -> Callable[[], None]:
        """Return *body* for the thread of *drafter*, which enters and waits for the others."""

        def work() -> None:
            with self._one_at_a_time:
                self._life.check()
                with self._life.excused():
                    self._enter(drafter)
            self._wait()
            body()

        return work

    def _enter(self, drafter: int) -> None:
        if self._opening.enter:
            self._opening.enter[drafter]()
        self._missing -= 1
        if not self._missing:
            self._opening.then()
            self._opened_s = time.perf_counter()
            self._open.set()

    def _wait(self) -> None:
        while not self._open.wait(TICK_S):
            self._life.check()
