"""The training loop, as one drafter's thread runs it: fetch, step, sum, move, mark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from dflash.execution import Runner, on_stream, use_device
from dflash.pipeline.feed import Feed
from dflash.train.agreement import Agreement
from dflash.train.replicas import GradientSum
from dflash.train.schedule import Cosine
from dflash.train.step import TrainStep

if TYPE_CHECKING:
    from dflash.pipeline.slots import BatchFacts


class AfterStep(Protocol):
    """What happens between two steps; ``boundary.Boundary`` in a run. True ends the loop."""

    def start(self, feed: Feed) -> None: ...

    def __call__(self, number: int, batches: "list[BatchFacts]", feed: Feed) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What one drafter's thread works with. ``boundary`` belongs to replica 0 alone."""

    replica: int
    step: TrainStep
    runner: Runner
    gradient_sum: GradientSum
    agreement: Agreement
    schedule: Cosine
    wants_metrics: Callable[[int], bool]
    boundary: AfterStep | None
    stream: torch.cuda.Stream | None


def train_loop(
    drafting: Drafting, *, first_step: int, end_step: int, accumulate_steps: int
) -> Callable[[Feed], None]:
    """Return the body of a drafter worker: steps *first_step* up to, not including, *end_step*."""

    def body(feed: Feed) -> None:
        use_device(drafting.step.device)
        with on_stream(drafting.stream):
            if drafting.boundary is not None:
                drafting.boundary.start(feed)
            for step in range(first_step, end_step):
                batches: list[BatchFacts] = []
                part = "metric" if drafting.wants_metrics(step + 1) else "normal"
                for facts in feed.batches(accumulate_steps, into=drafting.runner.feed):
                    drafting.runner(f"{part}_add" if batches else part)
                    batches.append(facts)
                batches = drafting.gradient_sum(drafting.replica, batches, feed.life)
                drafting.step.set_lr(drafting.schedule.at(step))
                drafting.runner("update")
                drafting.agreement(drafting.replica, step + 1)
                if drafting.boundary is not None and drafting.boundary(step + 1, batches, feed):
                    return

    return body
