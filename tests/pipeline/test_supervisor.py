"""Whatever ends a worker ends the run within seconds, under that worker's name."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash.errors import DataError, DeviceMemoryError, DflashError, HangError, WorkerDiedError
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.ring import Ring
from dflash.pipeline.signals import Signals, StoppedNowError, listening
from dflash.pipeline.supervisor import Worker, supervise

ROOT = Path(__file__).parents[2]
STOP_WITHIN_S = 5.0


def waiting(life: Lifeline) -> Callable[[], None]:
    """A body that waits in a ring for what never comes."""

    def body() -> None:
        Ring(["slot"]).take(0, life)

    return body


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def failure_of(error: BaseException, name: str) -> DflashError:
    """Supervise three workers of which *name* raises *error*; return what comes out."""
    life = Lifeline()
    bodies = {who: waiting(life) for who in ("loader", "target-0", "drafter-0")}
    bodies[name] = raising(error)
    workers = [Worker(who, body, decisive=who == "drafter-0") for who, body in bodies.items()]
    started = time.monotonic()
    with pytest.raises(DflashError) as caught:
        supervise(workers, life, watchdog_s=60.0, stacks_file=None)
    assert time.monotonic() - started < STOP_WITHIN_S
    assert not [t for t in threading.enumerate() if t.name in bodies], "no thread stays behind"
    assert not caught.value.threads_left
    return caught.value


@pytest.mark.parametrize("name", ["loader", "target-0", "drafter-0"])
def test_a_worker_s_exception_stops_all_and_is_shown_once_with_its_name(name: str) -> None:
    error = failure_of(ZeroDivisionError("a bug here"), name)
    assert isinstance(error, WorkerDiedError)
    assert error.exit_code == 14
    assert error.what.startswith(f"worker {name} died of ZeroDivisionError: a bug here\n")
    assert error.what.count("Traceback (most recent call last)") == 1
    assert "in body" in error.what
    assert error.hint == "", "whether there is something to go on from is the run's to know"


@pytest.mark.parametrize("name", ["loader", "target-0", "drafter-0"])
def test_an_error_meant_for_the_user_keeps_its_kind_and_sentence(name: str) -> None:
    error = DataError("row 3 is bad")
    assert failure_of(error, name) is error


def test_running_out_of_device_memory_is_an_error_of_its_own() -> None:
    error = failure_of(torch.OutOfMemoryError("CUDA out of memory.\nmore"), "drafter-0")
    assert isinstance(error, DeviceMemoryError)
    assert error.exit_code == 11
    assert error.what == "worker drafter-0 ran out of device memory: CUDA out of memory."
    assert "data.token_budget" in error.hint


def test_of_two_failures_the_first_is_told() -> None:
    life, died = Lifeline(), threading.Event()

    def first() -> None:
        try:
            raise KeyError("the cause")
        finally:
            died.set()

    def second() -> None:
        died.wait(10)
        while not life.halted:
            time.sleep(0.001)
        raise ValueError("a consequence")

    with pytest.raises(WorkerDiedError, match=r"worker one died of KeyError: 'the cause'"):
        supervise(
            [Worker("one", first), Worker("two", second, decisive=True)],
            life,
            watchdog_s=60.0,
            stacks_file=None,
        )


def test_the_run_ends_well_when_the_decisive_worker_returns() -> None:
    life, did = Lifeline(), []
    workers = [Worker("target-0", waiting(life)), Worker("d", lambda: did.append(1), decisive=True)]
    supervise(workers, life, watchdog_s=60.0, stacks_file=None)
    assert did == [1]
    assert life.halted


def test_a_worker_that_still_computes_when_the_run_is_done_is_waited_for() -> None:
    """Else the interpreter would end under it."""
    life, ended = Lifeline(), []

    def slow() -> None:
        while not life.halted:
            time.sleep(0.001)
        time.sleep(0.3)
        ended.append(1)

    workers = [Worker("target-0", slow), Worker("drafter-0", lambda: None, decisive=True)]
    supervise(workers, life, watchdog_s=60.0, stacks_file=None)
    assert ended == [1]


def test_a_hang_leaves_the_stacks_of_all_threads_with_their_names(tmp_path: Path) -> None:
    life, over = Lifeline(), threading.Event()

    def hang_in_this_function() -> None:
        over.wait(30)

    workers = [
        Worker("target-0", waiting(life)),
        Worker("drafter-0", hang_in_this_function, decisive=True),
    ]
    try:
        with pytest.raises(HangError, match=r"no progress|made progress for 0.4 s") as caught:
            supervise(workers, life, watchdog_s=0.4, stacks_file=tmp_path / "stacks.txt")
    finally:
        over.set()
    assert caught.value.exit_code == 5
    assert caught.value.threads_left
    assert str(tmp_path / "stacks.txt") in caught.value.what
    stacks = (tmp_path / "stacks.txt").read_text()
    for trace in ("hang_in_this_function", "ring.py", "is drafter-0", "is target-0", "MainThread"):
        assert trace in stacks


def test_a_worker_that_beats_is_no_hang_and_leaves_no_file(tmp_path: Path) -> None:
    life = Lifeline()

    def busy() -> None:
        for _ in range(20):
            time.sleep(0.05)
            life.beat()

    worker = Worker("drafter-0", busy, decisive=True)
    supervise([worker], life, watchdog_s=0.5, stacks_file=tmp_path / "stacks.txt")
    assert list(tmp_path.iterdir()) == []


def test_the_first_signal_asks_and_the_second_ends_at_once() -> None:
    signals, life = Signals(), Lifeline()
    before = signal.getsignal(signal.SIGTERM)
    worker = Worker("drafter-0", waiting(life), decisive=True)

    def send() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        while signals.stop is None:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    with listening(signals):
        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(StoppedNowError) as caught:
            supervise([worker], life, watchdog_s=60.0, stacks_file=None)
        sender.join()
    assert caught.value.signum == signal.SIGINT
    assert signals.stop == signal.SIGTERM
    assert signals.checkpoint.is_set()
    assert time.monotonic() - started < STOP_WITHIN_S
    assert signal.getsignal(signal.SIGTERM) is before


HOLDS_THE_INTERPRETER = """
import ctypes, sys
from pathlib import Path
from dflash.pipeline import watch
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.supervisor import Worker, supervise

watch.GRACE_S = 0.5
libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock while it calls
worker = Worker("drafter-0", lambda: libc.sleep(60), decisive=True)
supervise([worker], Lifeline(), watchdog_s=0.5, stacks_file=Path(sys.argv[1]))
"""


def test_a_hang_that_holds_the_interpreter_ends_too(tmp_path: Path) -> None:
    """No Python runs any more, so the exit code cannot be chosen; the stacks are there."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_INTERPRETER, str(tmp_path / "stacks.txt")],
        cwd=ROOT,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.startswith("Timeout")
    assert "<lambda>" in stacks
