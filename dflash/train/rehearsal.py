"""The dry run: everything is loaded, one step is made, and the plan meets what was used."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash.config import RunConfig
from dflash.execution import Runner, peak_allocated_bytes, peak_reserved_bytes
from dflash.pipeline.cores import cores_shared_by
from dflash.target.sizes import sizes_of
from dflash.train.build import build
from dflash.train.devices import settle_devices
from dflash.train.folder import DATA
from dflash.train.logbook import peak_resident_gib, resident_gib
from dflash.train.memory import GIB, DevicePlan, memory_plan, run_sizes
from dflash.train.readiness import warm_up
from dflash.train.step import TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a dry run saw."""

    plans: list[DevicePlan]
    loss: float
    step_s: float
    warm_up_s: float
    num_steps: int
    num_parameters: int
    num_anchors: int
    fill: float
    num_documents: int
    mode: str
    mode_why: str


def rehearse(config: RunConfig) -> Rehearsed:
    """Load everything, run one step, and compare the plan with what was used; writes nothing kept.

    Raises:
        DflashError: whatever a real run would raise before its first step.
    """
    before_gib = resident_gib()
    with (
        cores_shared_by(settle_devices(config).num_cpu_workers),
        tempfile.TemporaryDirectory(prefix="dflash-") as scratch,
    ):
        built = build(config, Path(scratch) / DATA)
        warm = warm_up(
            built, batch_number=0, unsafe=config.execution.allow_unsafe, say=lambda _text: None
        )
        built, runners = warm.built, warm.ready.runners
        for runner in runners:
            runner.enter_worker()
        started = time.perf_counter()
        num_batches = config.optim.accumulate_steps
        loss = _one_step(built.steps, runners, lr=built.schedule.at(0), num_batches=num_batches)
        step_s = time.perf_counter() - started
        sizes = run_sizes(
            config,
            sizes_of(built.targets[0].model, taps=built.targets[0].taps),
            num_cuda=torch.cuda.device_count(),
            fused=built.devices.mode.mode != "eager",
        )
        plans = [_with_peaks(plan, before_gib=before_gib) for plan in memory_plan(sizes)]
        return Rehearsed(
            plans=plans,
            loss=loss,
            step_s=step_s,
            warm_up_s=warm.warm_up_s,
            num_steps=built.num_steps,
            num_parameters=built.shape.num_parameters,
            num_anchors=built.steps[0].loss.num_anchors,
            fill=built.data.packing.fill(0),
            num_documents=len(built.data.dataset),
            mode=built.devices.mode.mode,
            mode_why=built.devices.mode.why,
        )


def _one_step(
    steps: Sequence[TrainStep], runners: Sequence[Runner], *, lr: float, num_batches: int
) -> float:
    losses = []
    for step, runner in zip(steps, runners, strict=True):
        step.set_lr(lr)
        for part in ("metric", *["metric_add"] * (num_batches - 1)):
            runner(part)
        losses.append(float(step.loss_sum / step.weight_sum.clamp(min=1e-9)))
        runner("update")
    return sum(losses) / len(losses)


def _with_peaks(plan: DevicePlan, *, before_gib: float) -> DevicePlan:
    if plan.device == "cpu":
        return replace(plan, measured_bytes=int((peak_resident_gib() - before_gib) * GIB))
    return replace(
        plan,
        measured_bytes=peak_allocated_bytes(torch.device(plan.device)),
        reserved_bytes=peak_reserved_bytes(torch.device(plan.device)),
    )
