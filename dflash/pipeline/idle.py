"""How long a CUDA stream stood still at its waits; the host, which runs ahead, cannot tell."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class StreamIdle:
    """Sums the time between an event before a wait and one after it, once both have happened.

    One thread waits; any thread may read ``seconds``, which never blocks on the device.
    """

    def __init__(self) -> None:
        self._pairs: deque[Pair] = deque()
        self._spare: deque[Pair] = deque()
        self._seconds = 0.0
        self._reading = threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Put calls inside that make the current stream wait."""
        pair = self._spare.pop() if self._spare else _pair()
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    @property
    def seconds(self) -> float:
        """Seconds of all waits that are over."""
        with self._reading:
            while self._pairs and self._pairs[0][1].query():
                pair = self._pairs.popleft()
                self._seconds += pair[0].elapsed_time(pair[1]) / 1e3
                self._spare.append(pair)
            return self._seconds


def _pair() -> Pair:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
