"""What happens between two steps: look, log, evaluate, save, stop."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.drafter.shape import DrafterShape
from dflash.execution import unsealed
from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import Lifeline
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


class _AbandonedError(Exception):
    """A stop was asked for while prompts were still to be decoded."""


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
    signals: Signals = field(default_factory=Signals)
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.rig = Rig(self.target)

    def measure(self, number: int, heartbeat: Callable[[], None]) -> EvalRecord | None:
        """Decode the prompts with the drafter as it is after step *number*.

        None without prompts, and where a stop was asked for before every block was decoded: tau is
        a mean over all prompts, and those that came first say something else.
        """

        def look() -> None:
            heartbeat()
            if self.signals.stop is not None:
                raise _AbandonedError

        if not self.prompts:
            return None
        try:
            look()
            with unsealed():  # decoding is no part of what was made ready
                result = evaluate(
                    self.target,
                    self.step.loss.drafter,
                    self.prompts,
                    settings=self.settings,
                    heartbeat=look,
                    rig=self.rig,
                )
        except _AbandonedError:
            return None
        return result.record(step=number, settings=self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """When what is due, by step numbers counted from 1; step 0 is before the first.

    ``end_step`` ends the whole run, ``last_step`` what this process does of it.
    """

    eval_every: int
    save_every: int
    end_step: int
    last_step: int

    def evaluates(self, step: int) -> bool:
        return step in (0, self.end_step) or bool(self.eval_every and step % self.eval_every == 0)

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

    @property
    def owes_evaluation(self) -> bool:
        """Whether an evaluation is due after step ``reached`` and has not been made."""
        made = self.tau is not None and self.tau_step == self.reached
        due = self.reached <= self.agenda.last_step and self.agenda.evaluates(self.reached)
        return bool(self.judge.prompts) and due and not made

    def __call__(self, number: int, batches: list[BatchFacts], feed: Feed) -> bool:
        """Close step *number*; True ends the run."""
        self.sentinel.watch(number, self.step.blocked, batches)
        self.logbook.end_step(number, batches, waits=feed.waits, lr=self.step.lr_now)
        self.reached = number
        best_before = self.best_tau
        tau = self._evaluate(feed.life) if self.owes_evaluation else None
        stopping = self.signals.stop is not None
        is_due = self.agenda.saves(number) or self.signals.checkpoint.is_set()
        if self.best_tau > best_before or stopping or is_due:
            self.signals.checkpoint.clear()
            self.save(feed.life, tau)
        return stopping or self.agenda.ends(number)

    def catch_up(self, say: Callable[[str], None]) -> float | None:
        """Make the evaluation that is owed before the first step, or where a stop cut it short."""
        if not self.owes_evaluation:
            return None
        where = f"after step {self.reached}" if self.reached else "before training"
        say(f"decoding {len(self.judge.prompts)} held-out prompts {where}")
        tau = self._evaluate(Lifeline())
        if tau is not None and self.reached:
            self.keeper.add_tau(self.reached, tau=tau, best_tau=self.best_tau)
        return tau

    def _evaluate(self, life: Lifeline) -> float | None:
        self._settle(life)
        with life.paused():
            record = self.judge.measure(self.reached, life.beat)
        if record is None:
            return None
        self.emit(record)
        self.tau, self.tau_step = record.tau, self.reached
        self.best_tau = max(self.best_tau, record.tau)
        return record.tau

    def _settle(self, life: Lifeline) -> None:
        """Learn all that is still on its way about the steps so far, before their weights count."""
        self.sentinel.look()
        self.agreement.settle(life)
        self.logbook.flush()

    def save(self, life: Lifeline, tau: float | None = None) -> None:
        """Write a checkpoint of the run as it is; *tau* was measured there."""
        self._settle(life)
        snapshot = Snapshot(
            step=self.reached,
            shape=self.judge.shape,
            target=self.target,
            weights=self.step.masters,
            state=self.step.moments() | {"totals": self.step.totals.sums},
            contract=self.contract,
            progress=Progress(**asdict(self.logbook.counters), best_tau=self.best_tau),
            config_toml=self.config_toml,
            tau=tau,
        )
        with life.paused():
            self.last_saved = self.keeper.save(snapshot)
        told = {"folder": self.last_saved.name}
        self.emit(EventRecord(step=self.reached, name="checkpoint", detail=told))
