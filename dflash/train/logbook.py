"""Turns what a run counts into step records, without making the step wait for the device."""

import resource
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.execution import capture_watch, peak_allocated_bytes, peak_reserved_bytes
from dflash.execution.compiling import num_compiled
from dflash.pipeline.slots import BatchFacts
from dflash.pipeline.waiting import Waits
from dflash.records import EventRecord, StepRecord
from dflash.train.totals import Totals, averages

GIB = float(2**30)


@dataclass(slots=True)
class Counters:
    """What has passed, over all replicas; goes into every checkpoint, so that a log goes on."""

    tokens: int = 0
    positions: int = 0
    batches: int = 0
    tokens_since_record: int = 0
    positions_since_record: int = 0

    def add(self, facts: BatchFacts, *, token_budget: int) -> None:
        self.tokens += facts.num_real_tokens
        self.positions += token_budget
        self.batches += 1
        self.tokens_since_record += facts.num_real_tokens
        self.positions_since_record += token_budget

    def start_interval(self) -> float:
        """Return the padding share since the record before, and count from here."""
        share = 1.0 - self.tokens_since_record / max(1, self.positions_since_record)
        self.tokens_since_record = self.positions_since_record = 0
        return share


@dataclass(frozen=True, slots=True)
class _Mark:
    """Readings at the record before (or where this process began), for rates."""

    step: int
    tokens: int
    waits: Waits
    compiled: int
    captured: int


@dataclass(slots=True)
class _Pending:
    sums: Tensor
    arrived: torch.cuda.Event | None
    facts: dict[str, Any]


class Logbook:
    """Counts batches and emits one StepRecord per interval.

    The sums are copied to the host behind the step that made them and read when they have arrived,
    at the latest at the next record or ``flush``.
    """

    def __init__(
        self,
        totals: Totals,
        emit: Callable[[StepRecord | EventRecord], None],
        *,
        every_steps: int,
        token_budget: int,
        batches_per_epoch: float,
    ) -> None:
        self.counters = Counters()
        self._totals = totals
        self._emit = emit
        self._every_steps = every_steps
        self._token_budget = token_budget
        self._batches_per_epoch = batches_per_epoch
        self._pending: deque[_Pending] = deque()
        self._mark: _Mark | None = None

    def wants(self, step: int) -> bool:
        """Whether step *step*, counted from 1, is logged; its batches are metric batches."""
        return step % self._every_steps == 0

    def start(self, step: int, waits: Waits) -> None:
        """Begin to measure rates."""
        self._mark = self._read(step, waits)

    def end_step(
        self, step: int, batches: Iterable[BatchFacts], *, waits: Callable[[], Waits], lr: float
    ) -> None:
        """Count the step's *batches*, emit what has arrived, and queue a record if one is due."""
        for facts in batches:
            self.counters.add(facts, token_budget=self._token_budget)
        self._emit_arrived()
        if self.wants(step):
            self._queue_record(step, waits(), lr=lr)
            self._emit_arrived()

    def _queue_record(self, step: int, waits: Waits, *, lr: float) -> None:
        assert self._mark is not None, "start was not called"
        before, now = self._mark, self._read(step, waits)
        self._mark = now
        steps = max(1, now.step - before.step)
        seconds = max(1e-9, now.waits.elapsed_s - before.waits.elapsed_s)
        facts = {
            "step": step,
            "epoch": self.counters.batches / self._batches_per_epoch,
            "lr": lr,
            "tokens": now.tokens,
            "tokens_per_s": (now.tokens - before.tokens) / seconds,
            "padding_share": self.counters.start_interval(),
            "step_s": seconds / steps,
            "wait_target_s": _per_step("target_for_slot_s", before, now),
            "wait_drafter_s": _per_step("drafter_for_features_s", before, now),
            "wait_data_s": _per_step("target_for_data_s", before, now),
            "recompiles": now.compiled - before.compiled,
            "captures": now.captured - before.captured,
            **device_memory(),
            "rss_gib": resident_gib(),
        }
        self._pending.append(_Pending(*self._copy_sums(), facts))
        self._totals.zero()

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
        found = averages(pending.sums)
        if found.loss is None:
            why = f"no slot was supervised in the {self._every_steps} steps up to this one"
            self._emit(EventRecord(step=pending.facts["step"], name="no_loss", detail={"why": why}))
            return
        self._emit(StepRecord.model_validate({**asdict(found), **pending.facts}))

    def _read(self, step: int, waits: Waits) -> _Mark:
        made = {"compiled": num_compiled(), "captured": capture_watch().total}
        return _Mark(step, self.counters.tokens, waits, **made)


def _per_step(name: str, before: _Mark, now: _Mark) -> float:
    waited_s = getattr(now.waits, name) - getattr(before.waits, name)
    return float(waited_s) / max(1, now.step - before.step)


def device_memory() -> dict[str, object]:
    """Peaks and allocation counts of every CUDA device this process uses; no synchronisation."""
    number = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = {f"cuda:{index}": torch.device("cuda", index) for index in range(number)}
    used = {name: gpu for name, gpu in gpus.items() if peak_reserved_bytes(gpu)}
    return {
        "allocated_gib": {name: peak_allocated_bytes(gpu) / GIB for name, gpu in used.items()},
        "reserved_gib": {name: peak_reserved_bytes(gpu) / GIB for name, gpu in used.items()},
        "device_allocs": {
            name: torch.cuda.memory_stats(gpu)["num_device_alloc"] for name, gpu in used.items()
        },
    }


def resident_gib() -> float:
    """Resident memory of this process; its peak where the system has no /proc."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / GIB
    return peak_resident_gib()


def peak_resident_gib() -> float:
    """Highest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
