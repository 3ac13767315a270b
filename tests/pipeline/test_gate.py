"""Drafters enter one at a time, and nobody starts before all have."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from dflash.pipeline.gate import Gate, Opening
from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.pipeline.supervisor import Worker, supervise

NUM_DRAFTERS = 3


def test_who_enters_does_so_alone_in_turn_and_in_its_own_thread_before_anybody_starts() -> None:
    inside: list[str] = []
    happened: list[str] = []

    def enter(what: str) -> Callable[[], None]:
        def body() -> None:
            inside.append(threading.current_thread().name)
            time.sleep(0.02)
            assert inside == [threading.current_thread().name]
            inside.clear()
            happened.append(f"{what} in {threading.current_thread().name}")

        return body

    opening = Opening(
        enter=[enter(f"enter {n}") for n in range(NUM_DRAFTERS)],
        prime=[enter("prime 0"), enter("prime 1")],
        then=lambda: happened.append("open"),
    )
    life = Lifeline()
    gate = Gate(opening, NUM_DRAFTERS, life)
    start = partial(happened.append, "start")
    bodies = {
        "loader": gate.held(start),
        **{f"target-{n}": gate.primed(n, start) for n in range(2)},
        **{f"drafter-{n}": gate.entered(n, start) for n in range(NUM_DRAFTERS)},
    }
    workers = [Worker(name, body, decisive=True) for name, body in bodies.items()]
    assert gate.open_s == 0.0
    supervise(workers, life, watchdog_s=60.0, stacks_file=None)
    assert happened == [
        *(f"enter {n} in drafter-{n}" for n in range(NUM_DRAFTERS)),
        "prime 0 in target-0",
        "prime 1 in target-1",
        "open",
        *["start"] * len(workers),
    ]
    assert gate.open_s > 0.0


def test_entering_may_take_longer_than_the_watchdog_waits() -> None:
    life, stepped = Lifeline(), threading.Event()
    gate = Gate(Opening([lambda: time.sleep(0.6)]), 1, life)

    def step() -> None:
        life.beat()
        stepped.set()

    supervise(
        [Worker("drafter-0", gate.entered(0, step), decisive=True)],
        life,
        watchdog_s=0.2,
        stacks_file=None,
    )
    assert stepped.is_set()


def test_who_cannot_enter_ends_the_run_and_nobody_starts() -> None:
    life, started = Lifeline(), threading.Event()

    def refuse() -> None:
        raise ZeroDivisionError("no capture here")

    gate = Gate(Opening([refuse]), 1, life)
    workers = [
        Worker("drafter-0", gate.entered(0, started.set), decisive=True),
        Worker("target-0", gate.held(started.set)),
    ]
    with pytest.raises(Exception, match="drafter-0 died of ZeroDivisionError: no capture here"):
        supervise(workers, life, watchdog_s=60.0, stacks_file=None)
    assert not started.is_set()
    with pytest.raises(Halted):
        gate.held(started.set)()
