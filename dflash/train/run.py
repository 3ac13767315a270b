"""A training run from a configuration to its last checkpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash.config import RunConfig, to_toml
from dflash.execution import process_seal
from dflash.pipeline.assembly import Watchdog
from dflash.pipeline.cores import cores_shared_by
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.signals import Signals, listening
from dflash.pipeline.waiting import Waits
from dflash.pipeline.workers import Span
from dflash.records import EvalRecord, EventRecord, RecordWriter, StepRecord, truncate_after
from dflash.train.agreement import Agreement
from dflash.train.boundary import Agenda, Boundary, Emit, Judge
from dflash.train.build import Built, build
from dflash.train.checkpoint import Keeper
from dflash.train.devices import settle_devices
from dflash.train.evaluation import EvalSettings
from dflash.train.events import entered, event, last_words, waits_detail, warmed_up
from dflash.train.fit import advised
from dflash.train.folder import (
    DATA,
    RECORDS,
    STACKS,
    choices,
    claimed,
    writable,
    write_config,
    write_environment,
)
from dflash.train.logbook import Logbook
from dflash.train.loop import Drafting, train_loop
from dflash.train.outcome import Outcome
from dflash.train.readiness import WarmRun, warm_up
from dflash.train.replicas import GradientSum
from dflash.train.resumption import (
    read_start,
    require_steps_left,
    restore,
    resumed_event,
    start_of,
    told_where_to_go_on,
)
from dflash.train.sentinel import Sentinel
from dflash.train.stored import TargetRef


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What the command line adds to a configuration.

    ``max_steps`` ends the run early without changing its schedule. ``begin`` learns the step the
    run goes on from and its last one, before any record; ``show`` receives every record, ``say`` a
    sentence now and then.
    """

    run_dir: Path
    resume: str = "auto"
    max_steps: int | None = None
    watchdog_s: float = 300.0
    begin: Callable[[int, int], None] = lambda _first_step, _last_step: None
    show: Emit = lambda _record: None
    say: Callable[[str], None] = lambda _text: None


def train(config: RunConfig, options: TrainOptions) -> Outcome:
    """Train a drafter; go on from the run folder's newest checkpoint if it has one.

    Raises:
        DflashError: one kind for each way this can fail; nothing written before is lost.
    """
    with claimed(options.run_dir), listening(signals := Signals()):
        devices = settle_devices(config)
        with (
            cores_shared_by(devices.num_cpu_workers),
            advised(config, fused=devices.mode.mode != "eager"),
            told_where_to_go_on(options.run_dir),
        ):
            return _Run(config, options, signals).go()


class _Run:
    """The objects of one run, in the order in which they come to be."""

    def __init__(self, config: RunConfig, options: TrainOptions, signals: Signals) -> None:
        self.config = config
        self.options = options
        self.signals = signals
        self.keeper = Keeper(
            options.run_dir,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            say=options.say,
        )
        with writable(options.run_dir):
            self.keeper.sweep()
        start = start_of(options.run_dir, options.resume)
        self.keeper.require_readable()
        self.built: Built = build(config, options.run_dir / DATA)
        self.step = self.built.steps[0]
        self.resumed = read_start(start, self.built.contract) if start else None
        self.first_step = self.resumed.step if self.resumed else 0
        self.last_step = min(self.built.num_steps, options.max_steps or self.built.num_steps)
        if self.keeper.newest() is None:
            require_steps_left(options.resume, self.first_step, last_step=self.last_step)
        self.gradient_sum = GradientSum(
            self.built.steps,
            self.built.devices.gradient_sum,
            streams=self.built.pipeline.streams,
        )
        self.agreement = Agreement(
            self.built.steps,
            every_steps=config.execution.check_replicas_every,
            last_step=self.last_step,
        )
        self.judge = Judge(
            target=self.built.targets[0],
            step=self.step,
            shape=self.built.shape,
            prompts=self.built.data.prompts,
            settings=EvalSettings(
                max_new_tokens=config.eval.max_new_tokens,
                seed=config.seed,
                stop_ids=self.built.targets[0].stop_ids,
            ),
            signals=signals,
        )

    def go(self) -> Outcome:
        run_dir = self.options.run_dir
        with writable(run_dir):
            # Without a checkpoint in here nothing stands behind the records that are there.
            truncate_after(
                run_dir / RECORDS,
                self.first_step if self.first_step and self.keeper.newest() else -1,
            )
            self._write_folder()
            writer = RecordWriter(run_dir / RECORDS)

        def keep(record: StepRecord | EvalRecord | EventRecord) -> None:
            with writable(run_dir):
                writer.write(record)

        def emit(record: StepRecord | EvalRecord | EventRecord) -> None:
            keep(record)
            self.options.show(record)

        with writer:
            self.options.begin(self.first_step, self.last_step)
            boundary = self._boundary(emit)
            for name in self.keeper.set_aside:
                keep(event(self.first_step, "set_aside", folder=name))
            if self.resumed:
                restore(self.resumed, self.built.steps, boundary)
            if self.first_step >= self.last_step and not boundary.owes_evaluation:
                return self._outcome(boundary)
            with last_words(lambda: boundary.reached, keep):  # the screen tells it once, later
                return self._train(boundary, emit)

    def _train(self, boundary: Boundary, emit: Emit) -> Outcome:
        if self.resumed:
            emit(resumed_event(self.resumed, self.config, self.options.run_dir))
        tau = boundary.catch_up(self.options.say)
        if boundary.owes_evaluation:
            return self._stop_before_a_step(boundary, emit)
        if self.first_step >= self.last_step:
            return self._outcome(boundary)
        warm = self._warm_up(emit)
        try:
            waits = self._run(boundary, warm, emit)
        finally:
            allocated = process_seal().open()
        outcome = self._outcome(
            boundary,
            waits,
            tau_before=None if self.first_step else tau,
            warm_up_s=warm.warm_up_s,
        )
        if any(allocated.values()):
            emit(event(outcome.step, "allocated_while_sealed", device_allocs=allocated))
        emit(event(outcome.step, "waits", **waits_detail(waits), advice=outcome.suggestion))
        if outcome.signal is not None:
            emit(event(outcome.step, "stopped", signal=outcome.signal))
        return outcome

    def _stop_before_a_step(self, boundary: Boundary, emit: Emit) -> Outcome:
        """Leave a checkpoint that the same command goes on from, with the evaluation first."""
        if self.keeper.newest() is None:
            self._restore_totals()
            boundary.save(Lifeline())
        emit(event(boundary.reached, "stopped", signal=self.signals.stop))
        return self._outcome(boundary)

    def _newest(self) -> Path | None:
        """The checkpoint that the run would go on from now."""
        return self.keeper.newest() or (self.resumed.path if self.resumed else None)

    def _restore_totals(self) -> None:
        if self.resumed:
            self.step.totals.sums.copy_(self.resumed.state["totals"])

    def _boundary(self, emit: Emit) -> Boundary:
        config, built = self.config, self.built
        logbook = Logbook(
            self.step.totals,
            emit,
            every_steps=config.log.every_steps,
            token_budget=config.data.token_budget,
            batches_per_epoch=built.data.packing.batches_per_epoch(0),
        )
        return Boundary(
            agenda=Agenda(
                eval_every=config.eval.every_steps,
                save_every=config.checkpoint.every_steps,
                end_step=built.num_steps,
                last_step=self.last_step,
            ),
            step=self.step,
            target=TargetRef(source=config.target.model, fingerprint=built.targets[0].fingerprint),
            contract=built.contract,
            config_toml=to_toml(config),
            sentinel=Sentinel(built.data.dataset.source_of, newest=self._newest),
            agreement=self.agreement,
            logbook=logbook,
            judge=self.judge,
            keeper=self.keeper,
            signals=self.signals,
            emit=emit,
            reached=self.first_step,
        )

    def _warm_up(self, emit: Emit) -> WarmRun:
        """Everything that compiles or allocates for the first time, here in the main thread."""
        built = self.built
        self.gradient_sum.warm_up()
        for note in (*self.gradient_sum.notes, *built.notes):
            self.options.say(note)
        batches_per_step = self.config.optim.accumulate_steps * len(built.steps)
        started = time.perf_counter()
        warm = warm_up(
            built,
            batch_number=self.first_step * batches_per_step,
            unsafe=self.config.execution.allow_unsafe,
            say=self.options.say,
        )
        self.built, mode = warm.built, warm.ready.choice
        self.options.say(f"execution mode {mode.mode}: {mode.why}")
        self._write_folder()
        self._restore_totals()  # only now, since a rehearsal leaves nothing measured
        emit(warmed_up(self.first_step, warm, elapsed_s=time.perf_counter() - started))
        return warm

    def _run(self, boundary: Boundary, warm: WarmRun, emit: Emit) -> Waits:
        built, config = self.built, self.config
        batches_per_step = config.optim.accumulate_steps * len(built.steps)
        bodies = [
            train_loop(
                Drafting(
                    replica=index,
                    step=step,
                    runner=warm.ready.runners[index],
                    gradient_sum=self.gradient_sum,
                    agreement=self.agreement,
                    schedule=built.schedule,
                    wants_metrics=boundary.logbook.wants,
                    boundary=boundary if index == 0 else None,
                    stream=built.pipeline.streams[index],
                ),
                first_step=self.first_step,
                end_step=self.last_step,
                accumulate_steps=config.optim.accumulate_steps,
            )
            for index, step in enumerate(built.steps)
        ]
        return built.pipeline.run(
            bodies,
            built.assemble,
            Span(self.first_step * batches_per_step, self.last_step * batches_per_step),
            life=Lifeline(),
            watchdog=Watchdog(self.options.watchdog_s, self.options.run_dir / STACKS),
            opening=warm.opening(
                first=lambda: self.agreement.warm_up(built.pipeline.streams),
                then=lambda: emit(entered(boundary.reached, warm)),
            ),
        )

    def _write_folder(self) -> None:
        write_config(self.options.run_dir, self.config)
        write_environment(self.options.run_dir, choices(self.built, self.gradient_sum.choice))

    def _outcome(
        self,
        boundary: Boundary,
        waits: Waits | None = None,
        *,
        tau_before: float | None = None,
        warm_up_s: float = 0.0,
    ) -> Outcome:
        devices, reached = self.built.devices, boundary.reached
        done = reached >= self.last_step and not boundary.owes_evaluation
        suggestion = f"nothing to do: the last step asked for is {self.last_step}"
        if waits is not None:
            suggestion = waits.suggestion(devices.targets, devices.drafters)
        elif not done:
            suggestion = "nothing ran, so there is nothing to balance"
        return Outcome(
            step=reached,
            num_steps=self.built.num_steps,
            tau_before=tau_before,
            tau=boundary.tau if boundary.tau_step == reached else None,
            last_tau=boundary.tau,
            last_tau_step=boundary.tau_step,
            checkpoint=boundary.last_saved,
            signal=None if done else self.signals.stop,
            waits=waits,
            suggestion=suggestion,
            warm_up_s=warm_up_s,
        )
