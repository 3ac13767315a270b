"""Marks between steps: when each ended on its device, what it trained on, who had waited by then.

Also what gives a drafter its batches here: a full slot, the pipeline, and the slot again.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash.pipeline.feed import Feed
from dflash.pipeline.slots import BatchFacts, FeatureSlot
from dflash.pipeline.waiting import Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps after *begin* up to and with *end*, counted from 1: their time and their tokens."""

    seconds: float
    steps: int
    tokens: int

    @property
    def step_ms(self) -> float:
        return self.seconds / self.steps * 1e3

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def joined(windows: Collection[Window]) -> Window:
    """All *windows* as one."""
    return Window(
        seconds=sum(window.seconds for window in windows),
        steps=sum(window.steps for window in windows),
        tokens=sum(window.tokens for window in windows),
    )


@dataclass(slots=True)
class Marks:
    """What the training loop calls after every step (``dflash.train.loop.AfterStep``).

    ``waits_at`` names the steps after which it is noted who has waited.
    """

    on_gpu: bool
    waits_at: Collection[int] = ()
    waits: dict[int, Waits] = field(default_factory=dict)
    _ends: list[Any] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def start(self, _feed: Feed) -> None:
        """Mark the beginning, on the current stream."""
        self._ends.append(self._now())

    def __call__(self, number: int, batches: list[BatchFacts], feed: Feed) -> bool:
        """Mark the end of step *number*; never ends the loop."""
        self._ends.append(self._now())
        self._tokens.append(sum(facts.num_real_tokens for facts in batches))
        if number in self.waits_at:
            self.waits[number] = feed.waits()
        return False

    def window(self, begin: int, end: int) -> Window:
        """The steps after *begin* up to *end*; call when all of them are over."""
        first, last = self._ends[begin], self._ends[end]
        if self.on_gpu:
            last.synchronize()
        seconds = first.elapsed_time(last) / 1e3 if self.on_gpu else last - first
        return Window(seconds=seconds, steps=end - begin, tokens=sum(self._tokens[begin:end]))

    def _now(self) -> Any:  # noqa: ANN401 - an event on a GPU, seconds on a CPU
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class SlotThenPipeline(Feed):
    """Batches from *slot* for *alone* steps, then *together* from *real*, then from *slot*."""

    def __init__(self, real: Feed, slot: FeatureSlot, *, alone: int, together: int) -> None:
        self.life = real.life
        self.waits = real.waits
        self._real = real
        self._slot = slot
        self._from_pipeline = range(alone, alone + together)
        self._given = 0

    def batches(
        self, count: int, *, into: Callable[[Mapping[str, Tensor]], None]
    ) -> Iterator[BatchFacts]:
        """As ``Feed.batches``."""
        for _ in range(count):
            number = self._given
            self._given += 1
            if number in self._from_pipeline:
                yield from self._real.batches(1, into=into)
                continue
            assert self._slot.facts is not None, "the slot was never filled"
            into(self._slot.inputs._asdict())
            yield self._slot.facts
            self.life.beat()


def take_all(count: int, marks: Marks, stream: torch.cuda.Stream | None) -> Callable[[Feed], None]:
    """Return the body of a drafter that takes *count* batches and does nothing with them."""

    def body(feed: Feed) -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
        with torch.cuda.stream(stream):
            marks.start(feed)
            for number, facts in enumerate(feed.batches(count, into=lambda _: None), start=1):
                marks(number, [facts], feed)

    return body
