"""Makes a running pipeline do so many steps of one kind, stand still, and do others.

The drafter's thread asks for its next order wherever it would fetch a batch; the thread that
measures gives one and waits for what came of it.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import TICK_S
from dflash.pipeline.slots import BatchFacts, FeatureSlot
from dflash.pipeline.waiting import Waits

Kind = Literal["target", "drafter", "pipeline"]


@dataclass(frozen=True, slots=True)
class Order:
    """So many timed steps, after some untimed ones.

    ``target``: batches are taken from the pipeline and nothing is done with them, so that slots
    are free at once. ``drafter``: steps on one full slot again and again. ``pipeline``: both.
    """

    kind: Kind
    lead_in: int
    count: int


@dataclass(slots=True, kw_only=True)
class Taken:
    """What the timed steps of an order took, in milliseconds and real tokens, and who waited."""

    times_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    waits: Waits = field(default_factory=lambda: Waits(0.0, 0.0, 0.0, 0.0))

    def and_(self, other: "Taken") -> "Taken":
        """Both together."""
        return Taken(
            times_ms=self.times_ms + other.times_ms,
            tokens=self.tokens + other.tokens,
            waits=_combined(self.waits, other.waits, sign=1),
        )

    @property
    def step_ms(self) -> float:
        """Mean of the timed steps."""
        return sum(self.times_ms) / len(self.times_ms)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens."""
        return sum(self.tokens) / sum(self.times_ms) * 1e3


def _combined(one: Waits, other: Waits, *, sign: int) -> Waits:
    return Waits(
        elapsed_s=one.elapsed_s + sign * other.elapsed_s,
        target_for_slot_s=one.target_for_slot_s + sign * other.target_for_slot_s,
        drafter_for_features_s=one.drafter_for_features_s + sign * other.drafter_for_features_s,
        target_for_data_s=one.target_for_data_s + sign * other.target_for_data_s,
    )


class Orders:
    """Between the thread that gives orders and the drafter's thread; one order at a time.

    It is what the training loop calls after every step (``dflash.train.loop.AfterStep``).
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._asked: queue.Queue[Order] = queue.Queue()
        self._answers: queue.Queue[Taken] = queue.Queue()
        self._order = Order("pipeline", 0, 0)
        self._number = 0
        self._marks: list[Any] = []
        self._tokens: list[int] = []
        self._waits_before: Waits | None = None

    def do(self, order: Order, worker: threading.Thread) -> Taken:
        """Have *order* carried out and wait for it.

        Raises:
            RuntimeError: *worker*, which runs the pipeline, has ended meanwhile.
        """
        self._asked.put(order)
        while True:
            try:
                return self._answers.get(timeout=TICK_S)
            except queue.Empty:
                if not worker.is_alive():
                    raise RuntimeError("the pipeline has ended before its order") from None

    def next(self, feed: Feed) -> Order:
        """Wait for an order and begin it; called by the drafter's thread."""
        while True:
            feed.life.check()
            feed.life.beat()
            try:
                self._order = self._asked.get(timeout=TICK_S)
            except queue.Empty:
                continue
            self._number, self._marks, self._tokens = 0, [], []
            if not self._order.lead_in:
                self._begin(feed)
            return self._order

    def start(self, _feed: Feed) -> None:
        """Nothing: an order marks its own beginning."""

    def __call__(self, number: int, batches: list[BatchFacts], feed: Feed) -> bool:
        """Mark the end of a step, whatever its *number* in the run; never ends the loop."""
        del number
        self._number += 1
        if self._number > self._order.lead_in:
            self._marks.append(self._now())
            self._tokens.append(sum(facts.num_real_tokens for facts in batches))
        elif self._number == self._order.lead_in:
            self._begin(feed)
        if self._number == self._order.lead_in + self._order.count:
            self._answers.put(self._taken(feed))
        return False

    def _begin(self, feed: Feed) -> None:
        """Mark the beginning with nothing under way, so that waits and times begin alike."""
        self._marks.append(self._now())
        self._wait_for(self._marks[0])
        self._waits_before = feed.waits()
        self._marks[0] = self._now()

    def _taken(self, feed: Feed) -> Taken:
        self._wait_for(self._marks[-1])
        assert self._waits_before is not None, "the order was never begun"
        return Taken(
            times_ms=[self._between(*marks) for marks in pairwise(self._marks)],
            tokens=self._tokens,
            waits=_combined(feed.waits(), self._waits_before, sign=-1),
        )

    def _now(self) -> Any:  # noqa: ANN401 - an event on a GPU, seconds on a CPU
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_for(self, mark: Any) -> None:  # noqa: ANN401
        if self._on_gpu:
            mark.synchronize()

    def _between(self, one: Any, other: Any) -> float:  # noqa: ANN401
        return float(one.elapsed_time(other) if self._on_gpu else (other - one) * 1e3)


class OrderedFeed(Feed):
    """The batches that orders ask for: of the pipeline, or of one full slot."""

    def __init__(self, real: Feed, slot: FeatureSlot, orders: Orders) -> None:
        self.life = real.life
        self.waits = real.waits
        self._real = real
        self._slot = slot
        self._orders = orders
        self._left = 0
        self._order = Order("pipeline", 0, 0)

    def batches(
        self, count: int, *, into: Callable[[Mapping[str, Tensor]], None]
    ) -> Iterator[BatchFacts]:
        """As ``Feed.batches``; waits for orders, for as long as it takes."""
        for _ in range(count):
            while not self._left:
                self._take_order()
            self._left -= 1
            if self._order.kind == "pipeline":
                yield from self._real.batches(1, into=into)
                continue
            assert self._slot.facts is not None, "the slot was never filled"
            into(self._slot.inputs._asdict())
            yield self._slot.facts
            self.life.beat()

    def _take_order(self) -> None:
        """Carry out an order for the target here; leave any other to the loop."""
        self._order = self._orders.next(self)
        count = self._order.lead_in + self._order.count
        if self._order.kind != "target":
            self._left = count
            return
        for number, facts in enumerate(self._real.batches(count, into=lambda _: None)):
            self._orders(number, [facts], self)
