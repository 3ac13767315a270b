"""What one process holds and has made: peaks of the allocator, graphs, compilations."""

import torch

from dflash.execution import capture_watch, peak_allocated_bytes, peak_reserved_bytes
from dflash.execution.compiling import num_cached, num_compiled, num_skipped
from dflash.measurement import Graphs, Memory
from dflash.train.logbook import GIB, peak_resident_gib
from dflash_bench.cases._case import Found

NO_POOL = (0, 0)
"""What the allocator calls the memory that belongs to no graph's pool."""


class Counters:
    """Counts from ``begin``, which is called after the first step, on one device.

    What is counted after the first step is None before there is one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._allocs = self._retries = self._compiled = self._captured = 0
        self._begun = False
        self._settled: tuple[int, int] | None = None
        self._steps: list[int] = []
        self._allocated_gib: list[float] = []
        self._reserved_gib: list[float] = []
        if self._on_gpu:
            capture_watch()  # counts from here on

    def begin(self) -> None:
        """Count from here: the first step is over."""
        self._begun = True
        self._allocs, self._retries = (
            self._stat("num_device_alloc"),
            self._stat("num_alloc_retries"),
        )
        self._compiled, self._captured = num_compiled(), capture_watch().total

    def read(self, step: int) -> None:
        """Note the peaks that there are by step number *step*; steps before it were the first."""
        if self._settled is None:
            self._settled = num_compiled(), capture_watch().total
        if self._on_gpu:
            self._steps.append(step)
            self._allocated_gib.append(peak_allocated_bytes(self.device) / GIB)
            self._reserved_gib.append(peak_reserved_bytes(self.device) / GIB)

    def memory(self) -> Memory:
        """Peaks so far; what only a GPU has is None on a CPU."""
        if not self._on_gpu:
            return Memory(rss_gib=peak_resident_gib())
        return Memory(
            peak_allocated_gib=peak_allocated_bytes(self.device) / GIB,
            peak_reserved_gib=peak_reserved_bytes(self.device) / GIB,
            graph_pools_gib=graph_pools_gib(self.device),
            rss_gib=peak_resident_gib(),
            device_allocs=self._since(self._stat("num_device_alloc"), self._allocs),
            alloc_retries=self._since(self._stat("num_alloc_retries"), self._retries),
            steps=self._steps,
            allocated_gib=self._allocated_gib,
            reserved_gib=self._reserved_gib,
        )

    def graphs(self) -> Graphs:
        """Compiled and captured so far."""
        captured = capture_watch().total
        return Graphs(
            compiled=num_compiled(),
            cached=num_cached(),
            recompiles=self._since(num_compiled(), self._compiled),
            captured=captured,
            captured_late=self._since(captured, self._captured),
            skipped=num_skipped(),
        )

    def found(self) -> Found:
        """Everything that there is to tell by now."""
        return {
            "memory": self.memory(),
            "graphs": self.graphs(),
            "unsettled": self.unsettled(),
        }

    def unsettled(self) -> str:
        """What has gone on after the first ``read``, though first steps should have ended it."""
        if self._settled is None:
            return ""
        compiled, captured = self._settled
        counts = {
            "compiled": num_compiled() - compiled,
            "captured": capture_watch().total - captured,
        }
        went_on = " and ".join(f"{what} ({count})" for what, count in counts.items() if count)
        return f"while it was timed, graphs were still {went_on}" if went_on else ""

    def _since(self, now: int, first_step: int) -> int | None:
        return now - first_step if self._begun else None

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _stat(self, figure: str) -> int:
        return int(torch.cuda.memory_stats(self.device).get(figure, 0)) if self._on_gpu else 0


def graph_pools_gib(device: torch.device) -> float:
    """What pools of captured graphs hold of *device*."""
    index = device.index or 0
    segments = torch.cuda.memory_snapshot()
    held = [
        int(segment["total_size"])
        for segment in segments
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != NO_POOL
    ]
    return sum(held) / GIB
