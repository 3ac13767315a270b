"""What all threads of a run share: whether to go on, who failed first, signs of life, a clock."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.2
"""How often a waiting thread looks whether the run was stopped; bounds the time to a full stop."""


class Halted(BaseException):
    """Raised inside a worker that waits while the run is being stopped."""


class Lifeline:
    """Shared by the supervisor and its workers; all methods are safe from any thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None
        self._last_beat_s = time.monotonic()
        self._num_excused = 0
        self._paused_s = 0.0
        self._pause_began_s: float | None = None

    def beat(self) -> None:
        """Report progress; the watchdog counts from the latest beat."""
        self._last_beat_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since any thread last reported progress; 0 while one is excused."""
        return 0.0 if self._num_excused else time.monotonic() - self._last_beat_s

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Let the calling thread be silent inside for as long as it takes."""
        with self._lock:
            self._num_excused += 1
        try:
            yield
        finally:
            self.beat()
            with self._lock:
                self._num_excused -= 1

    @property
    def steps_s(self) -> float:
        """A clock for steps and waits: it stands still while the run is paused."""
        with self._lock:
            now_s = time.perf_counter() if self._pause_began_s is None else self._pause_began_s
            return now_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do what is no step inside, such as an evaluation; whoever waits for it is not counted."""
        with self._lock:
            assert self._pause_began_s is None, "one thread pauses a run, and once at a time"
            began_s = self._pause_began_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._paused_s += time.perf_counter() - began_s
                self._pause_began_s = None

    def halt(self) -> None:
        """Ask every thread to end at its next wait."""
        self._stop.set()

    def fail(self, worker: str, error: BaseException) -> None:
        """Record *error* as the reason for stopping, unless another came first, and halt."""
        with self._lock:
            if self._failure is None:
                self._failure = (worker, error)
        self.halt()

    @property
    def failure(self) -> tuple[str, BaseException] | None:
        """Name and exception of the worker that failed first."""
        return self._failure

    @property
    def halted(self) -> bool:
        return self._stop.is_set()

    def check(self) -> None:
        """Raise Halted when the run is being stopped."""
        if self._stop.is_set():
            raise Halted
