"""Turns what a run counts into step records, without making the step wait for the device."""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dflash.pipeline.feed import Feed
from dflash.pipeline.slots import BatchFacts
from dflash.records import StepRecord
from dflash.train.totals import Totals

GIB = float(2**30)


@dataclass(slots=True)
class Counters:
    """What has passed since the run began; goes into every checkpoint."""

    tokens: int = 0
    positions: int = 0
    batches: int = 0

    def add(self, facts: BatchFacts, *, token_budget: int) -> None:
        self.tokens += facts.num_real_tokens
        self.positions += token_budget
        self.batches += 1


@dataclass(slots=True)
class _Mark:
    """Readings at the record before, so that a record covers only its own interval."""

    step: int
    time_s: float
    tokens: int
    positions: int
    wait_target_s: float
    wait_drafter_s: float
    wait_data_s: float


@dataclass(slots=True)
class _Pending:
    sums: Tensor
    arrived: torch.cuda.Event | None
    facts: dict[str, object] = field(default_factory=dict)


class Logbook:
    """Counts batches and emits one StepRecord per interval.

    The sums are copied to the host behind the step that made them and read when they have arrived,
    at the latest at the next record or ``flush``.
    """

    def __init__(
        self,
        totals: Totals,
        emit: Callable[[StepRecord], None],
        *,
        every_steps: int,
        token_budget: int,
        batches_per_epoch: float,
        num_replicas: int,
    ) -> None:
        self.counters = Counters()
        self._totals = totals
        self._emit = emit
        self._every_steps = every_steps
        self._token_budget = token_budget
        self._batches_per_epoch = batches_per_epoch
        self._num_replicas = num_replicas
        self._pending: deque[_Pending] = deque()
        self._mark: _Mark | None = None

    def wants(self, step: int) -> bool:
        """Whether step *step*, counted from 1, is logged; its batches are metric batches."""
        return step % self._every_steps == 0

    def count(self, facts: BatchFacts) -> None:
        """Count one batch of this replica; the others' are of the same number and size."""
        self.counters.add(facts, token_budget=self._token_budget)

    def start(self, step: int, feed: Feed) -> None:
        """Begin the first interval."""
        self._mark = self._read(step, feed)

    def end_step(self, step: int, feed: Feed, *, lr: float) -> None:
        """Emit what has arrived, and queue a record if *step* is due."""
        self._emit_arrived()
        if not self.wants(step):
            return
        assert self._mark is not None, "start was not called"
        before, now = self._mark, self._read(step, feed)
        self._mark = now
        steps = max(1, now.step - before.step)
        seconds = max(1e-9, now.time_s - before.time_s)
        positions = max(1, now.positions - before.positions)
        tokens = now.tokens - before.tokens
        facts = {
            "step": step,
            "epoch": self.counters.batches * self._num_replicas / self._batches_per_epoch,
            "lr": lr,
            "tokens": self.counters.tokens * self._num_replicas,
            "tokens_per_s": tokens * self._num_replicas / seconds,
            "padding_share": 1.0 - tokens / positions,
            "step_s": seconds / steps,
            "wait_target_s": (now.wait_target_s - before.wait_target_s) / steps,
            "wait_drafter_s": (now.wait_drafter_s - before.wait_drafter_s) / steps,
            "wait_data_s": (now.wait_data_s - before.wait_data_s) / steps,
            **device_memory(),
            "rss_gib": resident_gib(),
        }
        self._pending.append(_Pending(*self._copy_sums(), facts))
        self._totals.zero()
        self._emit_arrived()

    def flush(self) -> None:
        """Emit every queued record, waiting for its sums."""
        while self._pending:
            first = self._pending.popleft()
            if first.arrived is not None:
                first.arrived.synchronize()
            self._emit_one(first)

    def _copy_sums(self) -> tuple[Tensor, torch.cuda.Event | None]:
        sums = self._totals.sums
        if not sums.is_cuda:
            return sums.clone(), None
        on_host = torch.empty_like(sums, device="cpu", pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return on_host, arrived

    def _emit_arrived(self) -> None:
        while self._pending and (
            self._pending[0].arrived is None or self._pending[0].arrived.query()
        ):
            self._emit_one(self._pending.popleft())

    def _emit_one(self, pending: _Pending) -> None:
        averages = self._totals.averages(pending.sums)
        if averages.loss is None or averages.grad_norm is None:
            return  # nothing supervised in this interval; there is no loss to report
        record = {
            "loss": averages.loss,
            "grad_norm": averages.grad_norm,
            "token_accuracy": averages.token_accuracy,
            "accepted_tokens_per_block": averages.accepted_tokens_per_block,
            **pending.facts,
        }
        self._emit(StepRecord.model_validate(record))

    def _read(self, step: int, feed: Feed) -> _Mark:
        return _Mark(
            step=step,
            time_s=time.perf_counter(),
            tokens=self.counters.tokens,
            positions=self.counters.positions,
            wait_target_s=feed.target_wait_s,
            wait_drafter_s=feed.wait_s,
            wait_data_s=feed.data_wait_s(),
        )


def device_memory() -> dict[str, object]:
    """Peaks and allocation counts of every CUDA device this process uses; no synchronisation."""
    stats = {
        f"cuda:{index}": torch.cuda.memory_stats(index)
        for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    }
    used = {device: s for device, s in stats.items() if s.get("reserved_bytes.all.peak", 0)}
    return {
        "allocated_gib": {d: s["allocated_bytes.all.peak"] / GIB for d, s in used.items()},
        "reserved_gib": {d: s["reserved_bytes.all.peak"] / GIB for d, s in used.items()},
        "device_allocs": {d: s["num_device_alloc"] for d, s in used.items()},
    }


def resident_gib() -> float:
    """Resident memory of this process; its peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
