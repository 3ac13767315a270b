"""Peaks with pools of graphs, on an allocator that is made up after the rules of torch's."""

import gc
from collections.abc import Iterator

import pytest
import torch

from dflash.execution import peak_allocated_bytes, peak_reserved_bytes
from dflash.execution.peaks import Replayed, _allocated, _pools, _reserved

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Allocator:
    """Counts as CUDA's caching allocator does; every device by itself."""

    def __init__(self) -> None:
        self.now = {0: 0, 1: 0}
        self.peak = {0: 0, 1: 0}
        self.held = {0: 0, 1: 0}
        self.held_peak = {0: 0, 1: 0}

    def make(self, num_bytes: int, *, device: int = 0) -> None:
        self.now[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.now[device])
        self.held[device] = max(self.held[device], self.now[device])
        self.held_peak[device] = max(self.held_peak[device], self.held[device])

    def drop(self, num_bytes: int, *, device: int = 0) -> None:
        self.now[device] -= num_bytes

    def use_for_a_while(self, num_bytes: int, *, device: int = 0) -> None:
        self.make(num_bytes, device=device)
        self.drop(num_bytes, device=device)

    def reset(self, device: torch.device) -> None:
        index = device.index or 0
        self.peak[index], self.held_peak[index] = self.now[index], self.held[index]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    made = Allocator()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: made.now[device.index or 0])
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: made.peak[device.index or 0])
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda d: made.held_peak[d.index or 0])
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", made.reset)
    for kept in (_pools, _allocated, _reserved):
        kept.clear()
    yield made
    for kept in (_pools, _allocated, _reserved):
        kept.clear()


def captured(allocator: Allocator, *, transient: int, carried: int = 0) -> Replayed:
    pool = Replayed(GPU)
    with pool.captured():
        allocator.make(carried)
        allocator.use_for_a_while(transient)
    allocator.drop(carried)
    pool.counted()
    return pool


def test_one_pool_changes_nothing_of_the_peak(allocator: Allocator) -> None:
    allocator.make(100)
    pool = captured(allocator, transient=40, carried=7)
    assert pool.num_bytes == 47
    assert peak_allocated_bytes(GPU) == 147 == 100 + 47


def test_every_pool_that_is_there_counts_with_what_came_afterwards(allocator: Allocator) -> None:
    allocator.make(10)
    pools = [captured(allocator, transient=30, carried=5) for _ in range(3)]
    allocator.make(2)  # what the worker's thread needs
    assert peak_allocated_bytes(GPU) == 10 + 3 * 35 + 2
    assert len(pools) == 3
    assert peak_allocated_bytes(torch.device("cuda")) == peak_allocated_bytes(GPU)


def test_what_was_higher_before_stays_the_peak(allocator: Allocator) -> None:
    allocator.use_for_a_while(1000)
    pool = captured(allocator, transient=30)
    assert peak_allocated_bytes(GPU) == 1000
    assert peak_reserved_bytes(GPU) == 1000
    allocator.use_for_a_while(980)
    assert peak_allocated_bytes(GPU) == 1010, "980 beside the pool's 30"
    assert pool.num_bytes == 30


def test_a_pool_that_is_freed_counts_up_to_then(allocator: Allocator) -> None:
    allocator.make(10)
    one = captured(allocator, transient=50)
    other = captured(allocator, transient=50)
    one.freed()
    other.freed()
    assert peak_allocated_bytes(GPU) == 110
    allocator.use_for_a_while(90)
    assert peak_allocated_bytes(GPU) == 110
    allocator.use_for_a_while(101)
    assert peak_allocated_bytes(GPU) == 111


def test_a_pool_that_nobody_holds_any_more_does_not_count(allocator: Allocator) -> None:
    allocator.make(10)
    pool = captured(allocator, transient=50)
    del pool
    gc.collect()
    allocator.use_for_a_while(20)
    assert peak_allocated_bytes(GPU) == 60


def test_devices_are_counted_apart(allocator: Allocator) -> None:
    allocator.make(3, device=1)
    pool = captured(allocator, transient=50)
    assert pool.num_bytes == 50
    assert (peak_allocated_bytes(GPU), peak_allocated_bytes(OTHER)) == (50, 3)


def test_a_capture_that_fails_counts_what_it_took_and_no_pool(allocator: Allocator) -> None:
    allocator.make(10)
    pool = Replayed(GPU)

    def fail() -> None:
        with pool.captured():
            allocator.use_for_a_while(25)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert pool.num_bytes == 0
    assert peak_allocated_bytes(GPU) == 35
    allocator.use_for_a_while(5)
    assert peak_allocated_bytes(GPU) == 35


def test_a_cpu_counts_nothing(allocator: Allocator) -> None:
    pool = Replayed(torch.device("cpu"))
    with pool.captured():
        allocator.make(5)
    pool.counted()
    pool.freed()
    assert pool.num_bytes == 0
