"""Slots travel in order from several producers to one consumer, and waiters can be called off."""

import random
import threading
from collections.abc import Callable

import pytest

from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.pipeline.ring import Ring

PATIENCE_S = 20.0


def start(*bodies: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("num_producers", [1, 2, 5])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("first_turn", [0, 7])
def test_every_turn_arrives_once_in_order_with_what_its_producer_wrote(
    num_slots: int, num_producers: int, first_turn: int
) -> None:
    life, num_turns = Lifeline(), 200
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    ring = Ring(slots, first_turn=first_turn)
    turns = range(first_turn, first_turn + num_turns)
    seen: list[int] = []

    def produce(own: list[int]) -> None:
        for turn in own:
            slot = ring.claim(turn, life)
            assert slot == [], "a slot is claimed only after it was released"
            slot.append(turn)
            ring.publish(turn)

    def consume() -> None:
        for turn in turns:
            slot = ring.take(turn, life)
            assert ring.number(turn) == slots.index(slot)
            seen.extend(slot)
            slot.clear()
            ring.release(turn)

    shares = [list(turns[n::num_producers]) for n in range(num_producers)]
    join(start(consume, *(lambda own=own: produce(own) for own in shares)))
    assert seen == list(turns)


def test_random_delays_change_nothing_about_the_order() -> None:
    """Every producer waits for its own gate, and the gates open in disorder."""
    random.seed(0)
    life, ring, seen = Lifeline(), Ring([[0], [0], [0]]), []
    gates = [threading.Event() for _ in range(30)]

    def produce(turn: int) -> None:
        slot = ring.claim(turn, life)
        gates[turn].wait(PATIENCE_S)
        slot[0] = turn
        ring.publish(turn)

    def consume() -> None:
        for turn in range(30):
            seen.append(ring.take(turn, life)[0])
            ring.release(turn)

    threads = start(consume, *(lambda t=turn: produce(t) for turn in range(30)))
    for first in range(0, 30, 3):
        for turn in random.sample(range(first, first + 3), 3):
            gates[turn].set()
    join(threads)
    assert seen == list(range(30))


def test_a_producer_waits_until_its_slot_is_released() -> None:
    life, ring = Lifeline(), Ring(["a", "b"])
    claimed = threading.Event()

    def produce() -> None:
        for turn in range(3):
            ring.claim(turn, life)
            ring.publish(turn)
        claimed.set()

    threads = start(produce)
    assert ring.take(0, life) == "a"
    assert not claimed.wait(0.05), "turn 2 needs the slot of turn 0"
    ring.release(0)
    assert claimed.wait(PATIENCE_S)
    join(threads)
    assert ring.producer_wait_s >= 0.05
    assert ring.consumer_wait_s < ring.producer_wait_s


def test_who_waits_while_the_run_is_paused_is_not_counted() -> None:
    life, ring = Lifeline(), Ring(["only"])
    ring.claim(0, life)
    threads = start(lambda: ring.claim(1, life), lambda: ring.take(0, life))
    threading.Event().wait(0.05)
    with life.paused():
        at = life.steps_s
        threading.Event().wait(0.3)
        assert life.steps_s == at
    threading.Event().wait(0.05)
    ring.publish(0)
    join(threads[1:])
    ring.release(0)
    join(threads)
    assert 0.1 <= ring.producer_wait_s < 0.25
    assert 0.1 <= ring.consumer_wait_s < 0.25


def test_a_turn_that_came_early_is_not_taken_for_the_one_awaited() -> None:
    life, ring = Lifeline(), Ring(["a", "b"])
    ring.claim(1, life)
    ring.publish(1)
    got: list[str] = []
    threads = start(lambda: got.append(ring.take(0, life)))
    threads[0].join(0.05)
    assert got == []
    ring.claim(0, life)
    ring.publish(0)
    join(threads)
    assert got == ["a"]


@pytest.mark.parametrize("wait", ["claim", "take"])
def test_a_halted_run_calls_off_whoever_waits_or_comes_later(wait: str) -> None:
    life, ring = Lifeline(), Ring(["only"])
    if wait == "claim":
        ring.claim(0, life)
    turn = 1 if wait == "claim" else 0
    ended: list[type] = []

    def stay() -> None:
        try:
            getattr(ring, wait)(turn, life)
        except Halted as halted:
            ended.append(type(halted))

    threads = start(stay)
    threads[0].join(0.05)
    assert ended == []
    life.halt()
    join(threads)
    join(start(stay))
    assert ended == [Halted, Halted]


def test_the_first_failure_is_the_one_that_counts() -> None:
    life = Lifeline()
    life.check()
    first = ValueError("first")
    life.fail("one", first)
    life.fail("two", ValueError("second"))
    assert life.failure == ("one", first)
    assert life.halted
    with pytest.raises(Halted):
        life.check()


def test_silence_is_counted_from_the_latest_beat() -> None:
    life = Lifeline()
    threading.Event().wait(0.02)
    assert life.silent_s >= 0.02
    life.beat()
    assert life.silent_s < 0.02
