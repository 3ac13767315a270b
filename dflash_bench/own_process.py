"""A subject that finds out by which number NVML knows its process.

In a container that is another number than its own, so the child looks which one appears when it
opens its GPU. Children do so one at a time.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_bench.turns import Facts, Subject
from dflash_bench.weather import Watch


class Numbered:
    """The subject that *make* makes, with ``gpu_process`` among its facts."""

    def __init__(self, make: Callable[[], Subject], *, device: str) -> None:
        self._make = make
        self._device = device

    def __call__(self) -> "Numbered":
        self._subject = self._make()
        return self

    def __getattr__(self, order: str) -> Any:  # noqa: ANN401 - whatever the subject has
        return getattr(self.__dict__.get("_subject"), order)

    def build(self) -> Facts:
        """Open the GPU, then build the subject."""
        number = self._open() if self._device.startswith("cuda") else None
        return {"gpu_process": number, **self._subject.build()}

    def _open(self) -> int | None:
        import torch

        watch = Watch([self._device])
        with _one_at_a_time():
            before = set(watch.processes())
            torch.zeros(1, device=self._device)
            after = set(watch.processes())
        if os.getpid() in after:
            return os.getpid()
        new = after - before
        return new.pop() if len(new) == 1 else None


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one process of this machine in; all, where files cannot be locked."""
    with Path(__file__).open() as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
