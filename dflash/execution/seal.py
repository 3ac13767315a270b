"""The seal: from here on a recompile or a capture is an error, and device allocations are counted.

It is the process's: torch's compiler has one stance for all threads, and a capture in any thread
stalls its device. What is not part of the sealed programs (an evaluation between two steps) runs
inside ``unsealed``.
"""

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash.execution.captures import capture_watch
from dflash.execution.faults import sealed_capture_error


class Seal:
    """On from ``close`` to ``open``."""

    def __init__(self) -> None:
        self._closed = False
        self._lock = threading.Lock()
        self._lifted = 0
        self._here = threading.local()
        self._allocated: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Whether recompiles and captures are refused."""
        return self._closed

    def close(self) -> None:
        """Refuse recompiles and captures, and count device allocations from here."""
        assert not self._closed, "sealed twice"
        self._closed = True
        capture_watch().guard(self._refuse_capture)
        self._allocated = device_allocations()
        self._set_stance("fail_on_recompile")

    def open(self) -> dict[str, int]:
        """Allow everything again and return ``new_allocations``; safe to call twice."""
        allocated = self.new_allocations
        if self._closed:
            self._closed = False
            capture_watch().unguard(self._refuse_capture)
            self._set_stance("default")
        return allocated

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let this thread capture and compile inside.

        The compiler's stance has no notion of threads: while one thread is inside, a recompile in
        another passes unnoticed. What is allocated meanwhile is not counted.
        """
        if not self._closed:
            yield
            return
        before = device_allocations()
        with self._lock:
            self._lifted += 1
            self._set_stance("default")
        self._here.lifted = True
        try:
            yield
        finally:
            self._here.lifted = False
            with self._lock:
                self._lifted -= 1
                if not self._lifted and self._closed:
                    self._set_stance("fail_on_recompile")
                for device, count in device_allocations().items():
                    extra = count - before.get(device, 0)
                    self._allocated[device] = self._allocated.get(device, 0) + extra

    @property
    def new_allocations(self) -> dict[str, int]:
        """Device allocations while sealed, by device; 0 where all is as it should be."""
        counts = device_allocations() if self._closed else {}
        return {name: count - self._allocated.get(name, 0) for name, count in counts.items()}

    def _refuse_capture(self) -> None:
        if not getattr(self._here, "lifted", False):
            raise sealed_capture_error()

    @staticmethod
    def _set_stance(stance: str) -> None:
        if "torch._dynamo" in sys.modules:  # else nothing was ever compiled
            torch.compiler.set_stance(stance)


@functools.cache
def process_seal() -> Seal:
    """Return the one seal of this process."""
    return Seal()


@contextmanager
def sealed() -> Iterator[Seal]:
    """Keep the process sealed inside."""
    seal = process_seal()
    seal.close()
    try:
        yield seal
    finally:
        seal.open()


@contextmanager
def unsealed() -> Iterator[None]:
    """Let this thread capture and compile inside, where the process is sealed."""
    with process_seal().lifted():
        yield


def device_allocations() -> dict[str, int]:
    """Calls of cudaMalloc so far, of every device that this process uses; no synchronisation."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    counts = {
        f"cuda:{n}": torch.cuda.memory_stats(n).get("num_device_alloc", 0)
        for n in range(torch.cuda.device_count())
    }
    return {device: count for device, count in counts.items() if count}
