"""What happens between two steps: look, log, evaluate, save, stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.drafter.shape import DrafterShape
from dflash.pipeline.feed import Feed
from dflash.pipeline.slots import BatchFacts
from dflash.pipeline.supervisor import Signals
from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.target.model import Target
from dflash.train.checkpoint import Keeper, Snapshot
from dflash.train.evaluation import EvalSettings, evaluate
from dflash.train.logbook import Logbook
from dflash.train.sentinel import Sentinel
from dflash.train.step import TrainStep, computing_on
from dflash.train.stored import TargetRef

Emit = Callable[[StepRecord | EvalRecord | EventRecord], None]


@dataclass(frozen=True, slots=True)
class Judge:
    """Measures the accepted length on held-out prompts; without prompts it has nothing to say."""

    target: Target
    step: TrainStep
    shape: DrafterShape
    prompts: Sequence[Sequence[int]]
    settings: EvalSettings

    def measure(self, number: int, heartbeat: Callable[[], None]) -> EvalRecord | None:
        """Decode the prompts with the drafter as it is after step *number*."""
        if not self.prompts:
            return None
        with computing_on(self.step.device):
            result = evaluate(
                self.target,
                self.step.loss.drafter,
                self.prompts,
                settings=self.settings,
                heartbeat=heartbeat,
            )
        return result.record(step=number, settings=self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """When what is due. ``end_step`` is the number of the last step, counted from 1."""

    eval_every: int
    save_every: int
    end_step: int
    stop_after: int

    @property
    def last_step(self) -> int:
        """The step after which this process ends."""
        return min(self.end_step, self.stop_after)

    def evaluates(self, step: int) -> bool:
        return step == self.end_step or bool(self.eval_every and step % self.eval_every == 0)

    def saves(self, step: int) -> bool:
        return step == self.last_step or step % self.save_every == 0

    def ends(self, step: int) -> bool:
        return step == self.last_step


@dataclass(slots=True, kw_only=True)
class Boundary:
    """Replica 0's work after each step; called in its thread, so nothing else moves the weights."""

    agenda: Agenda
    step: TrainStep
    target: TargetRef
    contract: dict[str, Any]
    sentinel: Sentinel
    logbook: Logbook
    judge: Judge
    keeper: Keeper
    signals: Signals
    emit: Emit
    best_tau: float = 0.0
    tau: float | None = None
    last_saved: Path | None = None
    reached: int = 0

    def start(self, feed: Feed) -> None:
        """Open the first interval of the log."""
        self.logbook.start(self.reached, feed)

    def __call__(self, number: int, batches: list[BatchFacts], feed: Feed) -> bool:
        """Close step *number*; True ends the run."""
        for facts in batches:
            self.logbook.count(facts)
        self.sentinel.watch(number, self.step.blocked, batches)
        self.logbook.end_step(number, feed, lr=self.step.lr_now)
        self.reached = number
        is_best = self._evaluate(number, feed) if self.agenda.evaluates(number) else False
        stopping = self.signals.stop is not None
        if is_best or stopping or self.agenda.saves(number) or self.signals.checkpoint.is_set():
            self.signals.checkpoint.clear()
            self.save(number, is_best=is_best)
        return stopping or self.agenda.ends(number)

    def _evaluate(self, number: int, feed: Feed) -> bool:
        self.sentinel.look()
        self.logbook.flush()
        record = self.judge.measure(number, feed.life.beat)
        if record is None:
            return False
        self.emit(record)
        self.tau = record.tau
        is_best = record.tau > self.best_tau
        self.best_tau = max(self.best_tau, record.tau)
        return is_best

    def save(self, number: int, *, is_best: bool) -> None:
        """Write a complete checkpoint of step *number*."""
        self.sentinel.look()
        self.logbook.flush()
        counters = self.logbook.counters
        self.last_saved = self.keeper.save(
            Snapshot(
                step=number,
                shape=self.judge.shape,
                target=self.target,
                weights=dict(self.step.named),
                state=self.step.moments() | {"totals": self.step.totals.sums},
                contract=self.contract,
                progress={
                    "tokens": counters.tokens,
                    "positions": counters.positions,
                    "batches": counters.batches,
                    "best_tau": self.best_tau,
                },
                tau=self.tau,
            ),
            is_best=is_best,
        )
        self.emit(
            EventRecord(step=number, name="checkpoint", detail={"folder": self.last_saved.name})
        )
