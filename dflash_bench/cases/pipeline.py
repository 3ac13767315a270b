"""The whole pipeline on real, packed text: a random target feeds a drafter, each also alone.

Drives the production pipeline and training loop; a mode is one process with a pipeline that stands
still between its turns. Alone, the target fills slots that are free at once, and the drafter trains
on one full slot again and again; both before the first turn and after the last.
"""

import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dflash.data.sources import find_sources
from dflash.drafter.training import StepInputs
from dflash.execution import capture_watch, process_seal
from dflash.pipeline.assembly import Watchdog
from dflash.pipeline.cores import cores_shared_by
from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.slots import FeatureSlot
from dflash.pipeline.workers import Span
from dflash.train.agreement import Agreement
from dflash.train.build import build_around
from dflash.train.devices import settle_devices
from dflash.train.loop import Drafting, train_loop
from dflash.train.readiness import warm_up
from dflash.train.replicas import GradientSum
from dflash.train.totals import averages
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting
from dflash_bench.compile_clock import CompileClock
from dflash_bench.counters import Counters
from dflash_bench.machine import say
from dflash_bench.orders import Kind, Order, OrderedFeed, Orders, Taken
from dflash_bench.pipeline_figures import both_sides, run_config
from dflash_bench.planned import pipeline_gib
from dflash_bench.random_target import random_target, write_definitions

LOG_EVERY = 10
"""One step in ten is a metric step, as by default in a run."""

LEAD_IN_STEPS = 4
"""Untimed, after a standstill in which the target has filled every slot."""

TURN_S = 6.0
"""Longer turns are cut: what takes turns should do so often."""

LEAST_STEPS = 3
LOSS_STEPS = 5
END = 10**9
"""A step that no bench comes to."""

SILENCE_S = 3600.0
"""Whoever measures notices a hang much sooner."""


class PipelineSteps:
    """A subject: the pipeline runs in threads of its own and does what it is ordered to."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._open = ExitStack()
        self._life = Lifeline()
        self._failure: BaseException | None = None
        self._turns = Taken()
        self._turn_steps = setting.turn_steps
        self._loss: float | None = None
        self._alone: dict[Kind, Taken] = {"target": Taken(), "drafter": Taken()}

    def build(self) -> dict[str, Any]:
        started, setting = time.perf_counter(), self.setting
        self._compiling, self._capturing = CompileClock(), capture_watch()
        with tempfile.TemporaryDirectory(prefix="dflash-bench-") as scratch:
            folder = Path(scratch)
            config = run_config(setting, folder / "definitions.jsonl")
            devices = settle_devices(config)
            if not setting.data:
                joined = setting.lengths == "fixed"
                write_definitions(folder / "definitions.jsonl", joined=joined)
            self._open.enter_context(cores_shared_by(devices.num_cpu_workers))
            target = random_target(
                setting.shape,
                device=torch.device(setting.target_device),
                dtype=devices.target_dtype,
                seed=setting.seed,
            )
            # What is packed stays mapped when the folder is gone.
            self.built = build_around([target], config, folder / "data", devices=devices)
        device = torch.device(setting.devices[0])
        self._orders = Orders(on_gpu=device.type == "cuda")
        self._counters = Counters(device)
        return {"build_s": time.perf_counter() - started}

    def prepare(self) -> dict[str, Any]:
        self.warm = warm_up(self.built, batch_number=0, unsafe=False, say=say)
        self._full_slot = _copy_of(self.built.pipeline.slots[0][0])
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self._thread.start()
        first = self._do("pipeline", lead_in=0, count=1)
        self._counters.begin()
        return {
            "warm_up_s": self.warm.warm_up_s,
            "compile_s": self._compiling.seconds,
            "capture_s": self._capturing.seconds,
            "first_steps_ms": first.times_ms,
        }

    def settle(self) -> list[float]:
        """Make the steps whose loss is told, and measure each side alone."""
        first = self._do("pipeline", lead_in=0, count=LOSS_STEPS - 1)
        self._loss = averages(self.built.steps[0].totals.sums.cpu()).loss
        fitting = max(LEAST_STEPS, round(TURN_S / (first.step_ms * 1e-3)))
        self._turn_steps = min(self._turn_steps, fitting)
        self._measure_alone()
        self._counters.read(0)
        return first.times_ms

    def turn(self) -> list[float]:
        taken = self._do("pipeline")
        self._turns = self._turns.and_(taken)
        self._counters.read(len(self._turns.times_ms))
        return taken.times_ms

    def so_far(self) -> Found:
        found: Found = {
            "units": [float(tokens) for tokens in self._turns.tokens],
            "padded": self.setting.lengths == "variable",
            **self._counters.found(),
            "compile_s": self._compiling.seconds,
            "capture_s": self._capturing.seconds,
            "loss_steps": LOSS_STEPS,
        }
        if self._loss is not None:
            found["loss"] = self._loss
        return found

    def finish(self) -> dict[str, Any]:
        self._measure_alone()
        found = self.so_far()
        more = both_sides(self.setting, self.built, pipeline=self._turns, alone=self._alone)
        more["details"] |= {"device_allocs": process_seal().open()}  # type: ignore[operator]
        self._life.halt()
        self._thread.join()
        return {**found, "more": more}

    def _measure_alone(self) -> None:
        for kind, before in self._alone.items():
            self._alone[kind] = before.and_(self._do(kind))

    def _do(self, kind: Kind, *, lead_in: int = LEAD_IN_STEPS, count: int = 0) -> Taken:
        order = Order(kind, lead_in, count or self._turn_steps)
        try:
            return self._orders.do(order, self._thread)
        except RuntimeError:
            if self._failure is None:
                raise
        raise self._failure  # outside of the handler, which would become its context

    def _run(self) -> None:
        """Run the pipeline until it is halted; in a thread, so that orders can be given."""
        try:
            self.built.pipeline.run(
                [self._drafter()],
                self.built.assemble,
                Span(0, END),
                life=self._life,
                watchdog=Watchdog(SILENCE_S, None),
                opening=self.warm.opening(),
            )
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for an order
            self._failure = error
        finally:
            process_seal().open()
            self._open.close()

    def _drafter(self) -> Any:  # noqa: ANN401 - what Pipeline.run takes
        built, stream = self.built, self.built.pipeline.streams
        loop = train_loop(
            Drafting(
                replica=0,
                step=built.steps[0],
                runner=self.warm.ready.runners[0],
                gradient_sum=GradientSum(built.steps, built.devices.gradient_sum, streams=stream),
                agreement=Agreement(built.steps, every_steps=0, last_step=END),
                schedule=built.schedule,
                wants_metrics=lambda number: number % LOG_EVERY == 0,
                boundary=self._orders,
                stream=stream[0],
            ),
            first_step=0,
            end_step=END,
            accumulate_steps=1,
        )

        def body(feed: Feed) -> None:
            loop(OrderedFeed(feed, self._full_slot, self._orders))

        return body


def _copy_of(slot: FeatureSlot) -> FeatureSlot:
    return FeatureSlot(StepInputs(*(tensor.clone() for tensor in slot.inputs)), slot.facts)


def require_files(setting: Setting) -> tuple[str, ...]:
    """What the pipeline is to train on."""
    if setting.data:
        find_sources(setting.data)
    return ("data",)


def why_not(setting: Setting) -> str:
    """One drafter; graphs on a GPU only."""
    if len(setting.devices) > 1:
        return "the pipeline is measured with one drafter"
    if setting.devices[0] == "cpu" and setting.mode not in ("eager", "compiled"):
        return f"{setting.mode} captures CUDA graphs, and the drafter is on the CPU"
    return ""


def devices(setting: Setting) -> tuple[str, ...]:
    """The drafter's, whose steps are timed, and the target's."""
    return *setting.devices, setting.target_device


CASE = Case(
    name="pipeline",
    help="target and drafter together on real, packed text, and each alone",
    make=PipelineSteps,
    modes=MODES["pipeline"],
    devices=devices,
    require_files=require_files,
    why_not=why_not,
    planned_gib=pipeline_gib,
)
