"""Puts rings, lanes and workers together for M targets and N drafters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dflash.execution import use_device
from dflash.pipeline.feed import Feed
from dflash.pipeline.gate import Gate, Opening
from dflash.pipeline.idle import StreamIdle
from dflash.pipeline.lane import TargetLane
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.slots import FeatureSlot, HostSlot, feature_slots
from dflash.pipeline.supervisor import Worker, supervise
from dflash.pipeline.waiting import Waits
from dflash.pipeline.workers import Assemble, Span, load_batches, run_target
from dflash.target.model import Target

SLOTS_PER_TARGET = 1
"""The slots of a drafter, for each target that feeds it: one is filled while the step runs on its
own copy of the batch before. It is free again as soon as it is copied, long before that step ends,
so a second slot would only hide jitter, at T*K*D*2 bytes."""

HOST_SLOTS_PER_TARGET = 3


@dataclass(frozen=True, slots=True)
class Watchdog:
    """How long silence may last, and where the stacks go when it lasts longer."""

    limit_s: float
    stacks_file: Path | None


class Pipeline:
    """Every buffer and lane of a run; allocates on construction, starts threads in ``run``."""

    def __init__(
        self,
        targets: Sequence[Target],
        drafter_devices: Sequence[torch.device],
        *,
        token_budget: int,
        features_dtype: torch.dtype,
    ) -> None:
        width = len(targets[0].taps) * targets[0].hidden_size
        self.lanes = [TargetLane(target) for target in targets]
        self.streams = [
            torch.cuda.Stream(device) if device.type == "cuda" else None
            for device in drafter_devices
        ]
        self.slots: list[list[FeatureSlot]] = [
            feature_slots(
                SLOTS_PER_TARGET * math.ceil(len(targets) / len(drafter_devices)),
                token_budget=token_budget,
                features_width=width,
                device=device,
                dtype=features_dtype,
            )
            for device in drafter_devices
        ]

    def prime(self, assemble: Assemble, number: int) -> None:
        """Run every target once, in this thread, leaving batch *number* in every drafter's slot 0.

        Afterwards each target has its kernels and memory, and a step can be warmed up on real data.
        """
        for lane in self.lanes:
            self.prime_lane(lane, assemble, number)

    def prime_lane(self, lane: TargetLane, assemble: Assemble, number: int) -> None:
        """The same for one target; returns when its devices are done."""
        use_device(lane.device)
        batch = assemble(number, None)
        with torch.no_grad():
            for slots in self.slots:
                lane.run(HostSlot(batch), slots[0])
        for device in {lane.device, *(slots[0].inputs.features_TC.device for slots in self.slots)}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def run(
        self,
        drafters: Sequence[Callable[[Feed], None]],
        assemble: Assemble,
        span: Span,
        *,
        life: Lifeline,
        watchdog: Watchdog,
        opening: Opening = Opening(),  # noqa: B008 - frozen
    ) -> Waits:
        """Run batches *span* through targets and *drafters* until drafter 0 returns.

        No other thread does anything before *opening* is over.

        Raises:
            DflashError: what ``supervise`` raises.
        """
        rings = self._rings(span)
        gate = Gate(opening, len(drafters), life)
        load = partial(load_batches, assemble, rings.host, span=span, life=life)
        workers = [Worker("loader", gate.held(load))]
        for index, lane in enumerate(self.lanes):
            numbers = span.of(index, len(self.lanes))
            host = rings.host[index]
            forwards = partial(run_target, lane, host, rings.features, numbers=numbers, life=life)
            workers.append(Worker(f"target-{index}", gate.primed(index, forwards)))

        def waits() -> Waits:
            return rings.waits(gate.open_s)

        for index, drafter in enumerate(drafters):
            feed = Feed(rings.features[index], life, idle=rings.drafter_idle[index], waits=waits)
            body = gate.entered(index, partial(drafter, feed))
            workers.append(Worker(f"drafter-{index}", body, decisive=index == 0))
        supervise(workers, life, watchdog_s=watchdog.limit_s, stacks_file=watchdog.stacks_file)
        return waits()

    def _rings(self, span: Span) -> "_Rings":
        num_targets, num_drafters = len(self.lanes), len(self.slots)
        pinned = any(lane.stream is not None for lane in self.lanes)

        def host_slot() -> HostSlot:
            return HostSlot(copied=torch.cuda.Event() if pinned else None)

        return _Rings(
            host=[
                Ring(
                    [host_slot() for _ in range(HOST_SLOTS_PER_TARGET)],
                    first_turn=span.of(index, num_targets).start // num_targets,
                )
                for index in range(num_targets)
            ],
            features=[
                Ring(slots, first_turn=span.of(index, num_drafters).start // num_drafters)
                for index, slots in enumerate(self.slots)
            ],
            target_idle=[lane.idle for lane in self.lanes],
            drafter_idle=[StreamIdle() for _ in self.slots],
            on_device=pinned and all(stream is not None for stream in self.streams),
        )


@dataclass(frozen=True, slots=True)
class _Rings:
    host: list[Ring[HostSlot]]
    features: list[Ring[FeatureSlot]]
    target_idle: list[StreamIdle]
    drafter_idle: list[StreamIdle]
    on_device: bool

    def waits(self, elapsed_s: float) -> Waits:
        num_targets, num_drafters = len(self.host), len(self.features)
        for_slot_s = sum(ring.producer_wait_s for ring in self.features)
        for_features_s = sum(ring.consumer_wait_s for ring in self.features)
        if self.on_device:  # the threads run ahead of the devices, so their own waits say nothing
            for_slot_s = sum(idle.seconds for idle in self.target_idle)
            for_features_s = sum(idle.seconds for idle in self.drafter_idle)
        return Waits(
            elapsed_s=elapsed_s,
            target_for_slot_s=for_slot_s / num_targets,
            drafter_for_features_s=for_features_s / num_drafters,
            target_for_data_s=sum(ring.consumer_wait_s for ring in self.host) / num_targets,
        )
