"""Peaks of a GPU's memory, with what only replays use.

While a graph is captured, the allocator counts what it allocates. Afterwards those tensors are
gone for it, though every replay writes to their memory, which the graph's pool keeps. So its own
peak (``torch.cuda.max_memory_allocated``) has the largest pool in it and none of the others: of
three drafters on one H200 that use 13 GiB it told 5.2. Here pools are counted, and the allocator's
peaks begin anew with every one.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Replayed:
    """What the graphs of one pool use beyond what the allocator counts, in bytes on *device*.

    Counts nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture the pool's graphs inside, all of them, while nothing else uses the device."""
        if self.device.type != "cuda":
            yield
            return
        _begin_anew(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self.num_bytes = torch.cuda.max_memory_allocated(self.device) - before

    def counted(self) -> None:
        """Count them from now on: what the captures had left alive (gradients, say) is dropped."""
        if self.device.type == "cuda":
            _begin_anew(self.device)
            _pools.add(self)

    def freed(self) -> None:
        """Count them no more: the graphs are gone."""
        if self in _pools:
            _begin_anew(self.device)
            _pools.discard(self)


_pools: weakref.WeakSet[Replayed] = weakref.WeakSet()
_allocated: dict[int, int] = {}
_reserved: dict[int, int] = {}
"""By device index: the highest until the allocator's peaks began anew."""


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that tensors have used of a CUDA *device*, those of replays too."""
    now = torch.cuda.max_memory_allocated(device) + sum(
        pool.num_bytes for pool in [*_pools] if _index(pool.device) == _index(device)
    )
    return max(now, _allocated.get(_index(device), 0))


def peak_reserved_bytes(device: torch.device) -> int:
    """The most that the allocator has held of a CUDA *device*."""
    return max(torch.cuda.max_memory_reserved(device), _reserved.get(_index(device), 0))


def _begin_anew(device: torch.device) -> None:
    index = _index(device)
    _allocated[index] = peak_allocated_bytes(device)
    _reserved[index] = peak_reserved_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)


def _index(device: torch.device) -> int:
    return device.index or 0
