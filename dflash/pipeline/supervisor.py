"""The main thread's part: start every worker, watch them, and end them all together."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.errors import DeviceMemoryError, DflashError, WorkerDiedError
from dflash.pipeline.lifeline import TICK_S, Halted, Lifeline
from dflash.pipeline.watch import Watch

JOIN_S = 4.0
"""How long a failed run may take to end its threads: they look every TICK_S, or finish a step."""

STOP_NOW_JOIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Worker:
    """One thread of the pipeline. The run is over when every ``decisive`` worker has returned."""

    name: str
    body: Callable[[], None]
    decisive: bool = False


def supervise(
    workers: Sequence[Worker], life: Lifeline, *, watchdog_s: float, stacks_file: Path | None
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
    decisive = [t for t, w in zip(threads, workers, strict=True) if w.decisive]
    try:
        with Watch(life, limit_s=watchdog_s, stacks_file=stacks_file) as watch:
            life.beat()
            watch.look()  # arms it before a thread can take the interpreter for itself
            for thread in threads:
                thread.start()
            while not life.halted and any(thread.is_alive() for thread in decisive):
                watch.look()
                _first_alive(decisive).join(TICK_S)
            life.halt()
            while life.failure is None and any(thread.is_alive() for thread in threads):
                watch.look()
                _first_alive(threads).join(TICK_S)
    except DflashError as error:
        life.halt()
        error.threads_left = _end(threads, within_s=JOIN_S)
        raise
    except BaseException:  # a second signal: nobody waits any longer than it takes to look up
        life.halt()
        _end(threads, within_s=STOP_NOW_JOIN_S)
        raise
    if life.failure is not None:
        failure = _as_user_error(*life.failure)
        failure.threads_left = _end(threads, within_s=JOIN_S)
        raise failure from life.failure[1]


def _first_alive(threads: Sequence[threading.Thread]) -> threading.Thread:
    return next((thread for thread in threads if thread.is_alive()), threads[0])


def _end(threads: Sequence[threading.Thread], *, within_s: float) -> bool:
    """Wait for *threads*, all of them together at most *within_s*; True where one still runs."""
    deadline = time.monotonic() + within_s
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _guarded(worker: Worker, life: Lifeline) -> None:
    try:
        worker.body()
    except Halted:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever ends a worker must end the run
        life.fail(worker.name, error)


def memory_error(who: str, error: torch.OutOfMemoryError) -> DeviceMemoryError:
    """What the user is told when *who* ran out of device memory."""
    return DeviceMemoryError(
        f"{who} ran out of device memory: {str(error).splitlines()[0]}",
        hint="lower data.token_budget or data.anchor_density, set"
        " execution.activation_checkpointing = true, or give target and drafter separate"
        " devices; `dflash train CONFIG --dry-run` prints the memory plan",
    )


def _as_user_error(name: str, error: BaseException) -> DflashError:
    if isinstance(error, DflashError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return memory_error(f"worker {name}", error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return WorkerDiedError(f"worker {name} died of {type(error).__name__}: {error}\n{trace}")
