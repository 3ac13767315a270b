"""Batches one after another in a few host buffers that are allocated once.

The loader owns no thread: whoever iterates fills the buffers. Others may give them back from
their own threads with :meth:`Loader.release`.
"""

import threading
from collections import deque
from collections.abc import Iterator

from dflash.data.batch import PackedBatch, assemble
from dflash.data.packing import Packing
from dflash.data.shards import TokenDataset


class Loader:
    """Yields the batches numbered start, start + step, ... up to (not including) stop.

    Args:
        num_buffers: batches that may be out at the same time; asking for one more waits.
        pinned: page-lock the buffers, for copies to a GPU that do not block.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        packing: Packing,
        *,
        start: int,
        stop: int | None = None,
        step: int = 1,
        num_buffers: int = 2,
        pinned: bool = False,
    ) -> None:
        self._dataset = dataset
        self._packing = packing
        self._next = start
        self._stop = stop
        self._step = step
        self._changed = threading.Condition()
        self._closed = False
        self._free = deque(
            PackedBatch.allocate(packing.token_budget, pinned=pinned) for _ in range(num_buffers)
        )
        self._out: set[int] = set()

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        if self._stop is not None and self._next >= self._stop:
            raise StopIteration
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise StopIteration
            batch = self._free.popleft()
            self._out.add(id(batch))
        number, self._next = self._next, self._next + self._step
        return assemble(self._dataset, self._packing, number, out=batch)

    def release(self, batch: PackedBatch) -> None:
        """Give a batch's buffers back; its tensors may change from now on."""
        with self._changed:
            if id(batch) not in self._out:
                raise ValueError(f"batch {batch.number} is not out: released twice, or foreign")
            self._out.remove(id(batch))
            self._free.append(batch)
            self._changed.notify()

    def close(self) -> None:
        """End the iteration, also one that is waiting in another thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
