"""A ring of slots between one producer at a time and one consumer, in a fixed order."""

import threading
from typing import Generic, TypeVar

from dflash.pipeline.lifeline import TICK_S, Lifeline

Slot = TypeVar("Slot")


class Ring(Generic[Slot]):
    """Slot ``turn % len(slots)`` carries turn ``turn``; turns are consumed strictly in order.

    Several producers may work on different turns at once, since every turn has its own slot. The
    ring holds no tensors of its own and never copies: it says only whose turn a slot is.
    """

    def __init__(self, slots: list[Slot], *, first_turn: int = 0) -> None:
        self._slots = slots
        self.first_turn = first_turn
        self._next_read = first_turn
        self._published: set[int] = set()
        self._changed = threading.Condition()
        self.producer_wait_s = 0.0
        self.consumer_wait_s = 0.0

    def number(self, turn: int) -> int:
        """Index of the slot that carries *turn*."""
        return turn % len(self._slots)

    def claim(self, turn: int, life: Lifeline) -> Slot:
        """Wait until *turn*'s slot is free, and return it for writing."""
        started_s = life.steps_s
        with self._changed:
            while turn >= self._next_read + len(self._slots):
                life.check()
                self._changed.wait(TICK_S)
            self.producer_wait_s += life.steps_s - started_s
        life.check()
        return self._slots[self.number(turn)]

    def publish(self, turn: int) -> None:
        """Hand *turn*'s written slot to the consumer."""
        with self._changed:
            self._published.add(turn)
            self._changed.notify_all()

    def take(self, turn: int, life: Lifeline) -> Slot:
        """Wait until *turn* was published, and return its slot for reading."""
        started_s = life.steps_s
        with self._changed:
            while turn not in self._published:
                life.check()
                self._changed.wait(TICK_S)
            self.consumer_wait_s += life.steps_s - started_s
        life.check()
        return self._slots[self.number(turn)]

    def release(self, turn: int) -> None:
        """Give *turn*'s slot back to the producers."""
        with self._changed:
            self._published.remove(turn)
            self._next_read = turn + 1
            self._changed.notify_all()
