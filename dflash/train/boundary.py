"""What happens between two steps: look, log, evaluate, save, stop."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.drafter.shape import DrafterShape
from dflash.execution import unsealed
from dflash.pipeline.feed import Feed
from dflash.pipeline.signals import Signals
from dflash.pipeline.slots import BatchFacts
from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.target.model import Target
from dflash.train.agreement import Agreement
from dflash.train.checkpoint import Keeper, Progress, Snapshot
from dflash.train.evaluation import EvalSettings, Rig, evaluate
from dflash.train.logbook import Logbook
from dflash.train.sentinel import Sentinel
from dflash.train.step import TrainStep
from dflash.train.stored import TargetRef

Emit = Callable[[StepRecord | EvalRecord | EventRecord], None]


@dataclass(slots=True)
class Judge:
    """Measures the accepted length on held-out prompts; without prompts it has nothing to say.

    ``rig`` keeps captured steps and static caches from one evaluation to the next.
    """

    target: Target
    step: TrainStep
    shape: DrafterShape
    prompts: Sequence[Sequence[int]]
    settings: EvalSettings
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.rig = Rig(self.target)

    def measure(self, number: int, heartbeat: Callable[[], None]) -> EvalRecord | None:
        """Decode the prompts with the drafter as it is after step *number*."""
        if not self.prompts:
            return None
        with unsealed():  # decoding is no part of what was made ready
            result = evaluate(
                self.target,
                self.step.loss.drafter,
                self.prompts,
                settings=self.settings,
                heartbeat=heartbeat,
                rig=self.rig,
            )
        return result.record(step=number, settings=self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """When what is due, by step numbers counted from 1.

    ``end_step`` ends the whole run, ``last_step`` what this process does of it.
    """

    eval_every: int
    save_every: int
    end_step: int
    last_step: int

    def evaluates(self, step: int) -> bool:
        return step == self.end_step or bool(self.eval_every and step % self.eval_every == 0)

    def saves(self, step: int) -> bool:
        return step == self.last_step or step % self.save_every == 0

    def ends(self, step: int) -> bool:
        return step == self.last_step


@dataclass(slots=True, kw_only=True)
class Boundary:
    """Replica 0's work after each step; called in its thread, so nothing else moves the weights.

    ``tau`` is the latest measurement, made after step ``tau_step``; ``reached`` the latest step
    that is done.
    """

    agenda: Agenda
    step: TrainStep
    target: TargetRef
    contract: dict[str, Any]
    config_toml: str
    sentinel: Sentinel
    agreement: Agreement
    logbook: Logbook
    judge: Judge
    keeper: Keeper
    signals: Signals
    emit: Emit
    best_tau: float = 0.0
    tau: float | None = None
    tau_step: int = 0
    last_saved: Path | None = None
    reached: int = 0

    def start(self, feed: Feed) -> None:
        """Open the first interval of the log."""
        self.logbook.start(self.reached, feed.waits())

    def __call__(self, number: int, batches: list[BatchFacts], feed: Feed) -> bool:
        """Close step *number*; True ends the run."""
        self.sentinel.watch(number, self.step.blocked, batches)
        self.logbook.end_step(number, batches, waits=feed.waits, lr=self.step.lr_now)
        self.reached = number
        tau = self._evaluate(number, feed) if self.agenda.evaluates(number) else None
        is_best = tau is not None and tau > self.best_tau
        self.best_tau = max(self.best_tau, tau or 0.0)
        stopping = self.signals.stop is not None
        if is_best or stopping or self.agenda.saves(number) or self.signals.checkpoint.is_set():
            self.signals.checkpoint.clear()
            self._save(number, tau, feed)
        return stopping or self.agenda.ends(number)

    def _evaluate(self, number: int, feed: Feed) -> float | None:
        self._settle(feed)
        record = self.judge.measure(number, feed.life.beat)
        if record is None:
            return None
        self.emit(record)
        self.tau, self.tau_step = record.tau, number
        return record.tau

    def _settle(self, feed: Feed) -> None:
        """Learn all that is still on its way about the steps so far, before their weights count."""
        self.sentinel.look()
        self.agreement.settle(feed.life)
        self.logbook.flush()

    def _save(self, number: int, tau: float | None, feed: Feed) -> None:
        self._settle(feed)
        self.last_saved = self.keeper.save(
            Snapshot(
                step=number,
                shape=self.judge.shape,
                target=self.target,
                weights=self.step.masters,
                state=self.step.moments() | {"totals": self.step.totals.sums},
                contract=self.contract,
                progress=Progress(**asdict(self.logbook.counters), best_tau=self.best_tau),
                config_toml=self.config_toml,
                tau=tau,
            )
        )
        self.emit(
            EventRecord(step=number, name="checkpoint", detail={"folder": self.last_saved.name})
        )
