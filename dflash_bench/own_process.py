"""A subject that finds out by which number NVML knows its process.

In a container that is another number than its own, so the child looks which one appears when it
opens its GPU. Children do so one at a time.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_bench.samples import GIB
from dflash_bench.subjects import Facts, Subject, known_of
from dflash_bench.weather import Watch


class Numbered:
    """The subject that *make* makes, with ``gpu_process`` among its facts.

    ``process_gib`` is among what it knows so far: a subject that fails does so mostly where nobody
    else is watching.

    Args:
        devices: that it uses; the first is opened before anything else.
        uuids: of GPUs, as whoever starts the process has found them out.
    """

    def __init__(
        self, make: Callable[[], Subject], *, devices: Sequence[str], uuids: Mapping[str, str]
    ) -> None:
        self._make = make
        self._devices = devices
        self._uuids = {name: uuid for name, uuid in uuids.items() if name in devices}

    def __call__(self) -> "Numbered":
        self._subject = self._make()
        return self

    def __getattr__(self, order: str) -> Any:  # noqa: ANN401 - whatever the subject has
        return getattr(self.__dict__.get("_subject"), order)

    def build(self) -> Facts:
        """Open the GPU, then build the subject."""
        self._watch = Watch(self._devices, uuids=self._uuids)
        self._number = self._open() if self._devices[0].startswith("cuda") else None
        return {"gpu_process": self._number, **self._subject.build()}

    def so_far(self) -> Facts:
        """What the subject knows, and what the process holds of its GPUs."""
        known, number = known_of(self._subject), self._number
        held = None if number is None else self._watch.processes().get(number)
        return {**known, "gpu_process": number, "process_gib": held / GIB if held else None}

    def _open(self) -> int | None:
        import torch

        from dflash.execution import use_device

        with _one_at_a_time():
            before = set(self._watch.processes())
            use_device(torch.device(self._devices[0]))
            torch.zeros(1, device=self._devices[0])
            after = set(self._watch.processes())
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
