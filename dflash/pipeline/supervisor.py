"""The main thread's part: start every worker, watch them, and end them all together."""

import faulthandler
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from dflash.errors import DeviceMemoryError, DflashError, HangError, WorkerDiedError
from dflash.pipeline.lifeline import TICK_S, Halted, Lifeline

JOIN_S = 4.0
"""How long a halted run may take to end its threads: they look every TICK_S, or finish a step."""


class StoppedNowError(BaseException):
    """A second signal arrived: end without another checkpoint."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """What the user asked for from outside: stop at the next step, or a checkpoint now."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self.checkpoint = threading.Event()

    def on_stop(self, signum: int, _frame: FrameType | None) -> None:
        if self.stop is not None:
            raise StoppedNowError(signum)
        self.stop = signum

    def on_checkpoint(self, _signum: int, _frame: FrameType | None) -> None:
        self.checkpoint.set()


@contextmanager
def listening(signals: Signals) -> Iterator[None]:
    """Route SIGTERM and SIGINT to a stop and SIGUSR2 to a checkpoint while inside."""
    handlers = {
        signal.SIGTERM: signals.on_stop,
        signal.SIGINT: signals.on_stop,
        signal.SIGUSR2: signals.on_checkpoint,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Worker:
    """One thread of the pipeline. The run is over when every ``decisive`` worker has returned."""

    name: str
    body: Callable[[], None]
    decisive: bool = False


def supervise(
    workers: list[Worker], life: Lifeline, *, watchdog_s: float, stacks_file: Path | None
) -> None:
    """Run *workers* until the decisive ones return; call from the main thread.

    Raises:
        WorkerDiedError: a worker ended with an exception that is no DflashError (those are raised
            as they are; out-of-memory becomes DeviceMemoryError); carries its name and traceback.
        HangError: no worker reported progress for *watchdog_s* seconds; the stacks of all threads
            are in *stacks_file*.
    """
    threads = [
        threading.Thread(target=_guarded, args=(worker, life), name=worker.name, daemon=True)
        for worker in workers
    ]
    life.beat()
    for thread in threads:
        thread.start()
    decisive = [t for t, w in zip(threads, workers, strict=True) if w.decisive]
    try:
        while not life.halted and any(thread.is_alive() for thread in decisive):
            _watch(life, watchdog_s=watchdog_s, stacks_file=stacks_file)
            for thread in decisive:
                thread.join(TICK_S)
    finally:
        life.halt()
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    _raise_failure(life)


def _guarded(worker: Worker, life: Lifeline) -> None:
    try:
        worker.body()
    except Halted:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever ends a worker must end the run
        life.fail(worker.name, error)


def _watch(life: Lifeline, *, watchdog_s: float, stacks_file: Path | None) -> None:
    if life.silent_s <= watchdog_s:
        return
    where = "no run folder to write stacks to"
    if stacks_file is not None:
        with stacks_file.open("w") as out:
            faulthandler.dump_traceback(file=out, all_threads=True)
        where = f"the stacks of all threads are in {stacks_file}"
    life.halt()
    raise HangError(
        f"no thread of the pipeline made progress for {watchdog_s:.0f} s; {where}",
        hint="raise --watchdog if a step really takes that long; else look for a lock or a CUDA"
        " call that every stack waits in",
    )


def memory_error(who: str, error: torch.OutOfMemoryError) -> DeviceMemoryError:
    """What the user is told when *who* ran out of device memory."""
    return DeviceMemoryError(
        f"{who} ran out of device memory: {str(error).splitlines()[0]}",
        hint="lower data.token_budget or data.anchor_density, set"
        " execution.activation_checkpointing = true, or give target and drafter separate"
        " devices; `dflash train CONFIG --dry-run` prints the memory plan",
    )


def _raise_failure(life: Lifeline) -> None:
    if life.failure is None:
        return
    name, error = life.failure
    if isinstance(error, DflashError):
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        raise memory_error(f"worker {name}", error) from error
    trace = "".join(traceback.format_exception(error)).rstrip()
    raise WorkerDiedError(
        f"worker {name} died of {type(error).__name__}: {error}\n{trace}",
        hint="the run can go on from its last checkpoint with the same command",
    ) from error
