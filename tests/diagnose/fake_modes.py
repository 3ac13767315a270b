"""Failure modes that need no torch: each ends its child in one of the ways a child can end.

Fakes.

Symptom
    As its name says.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.diagnose.timeline import mark
from dflash.failures import FailureMode
from dflash.failures._mode import Death


def remedy() -> None:
    pass


def fake(
    slug: str, fault: Callable[[], float], *deaths: Death, chance: bool = True, limit_s: float = 60
) -> FailureMode:
    def reproduce(*, faulty: bool, seed: int = 0) -> float:
        mark("cuda", seed=seed)
        return fault() if faulty else 0.0

    reproduce.__module__ = __name__
    return FailureMode(
        slug=slug,
        measures="bad things",
        unit="things",
        limit=0.0,
        reproduce=reproduce,
        remedy=remedy,
        child=True,
        deaths=frozenset(deaths),
        chance=chance,
        time_limit_s=limit_s,
    )


def crash() -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def hang() -> float:
    thread = threading.Thread(target=time.sleep, args=(60,), name="stuck-worker")
    thread.start()
    thread.join()
    return 0.0


def linger() -> float:
    """Hang with a process of its own; say the ids of both in the file named by PIDS."""
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    place = Path(os.environ["PIDS"]) / str(os.getpid())
    place.write_text(str(own.pid), encoding="utf-8")
    return hang()


def see_gpu() -> float:
    """Return the number of the only GPU that is shown."""
    time.sleep(0.2)
    return float(os.environ["CUDA_VISIBLE_DEVICES"])


def meet() -> float:
    """Return how many came to the folder named by MEETING within five seconds, two at most."""
    place, deadline = Path(os.environ["MEETING"]), time.monotonic() + 5
    (place / str(os.getpid())).touch()
    while len(found := list(place.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return float(len(found))


def cuda() -> float:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def memory() -> float:
    raise MemoryError


def lose_a_thread() -> float:
    def worker() -> None:
        raise AssertionError

    thread = threading.Thread(target=worker, name="worker-1")
    thread.start()
    thread.join()
    return 0.0


def leave() -> float:
    os._exit(3)


def be_killed() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def slow(*, faulty: bool, seed: int = 0) -> float:
    time.sleep(60)
    return float(faulty + seed)


SEGV = fake("segv", crash, "signal")
HANG = fake("hang", hang, "hang", chance=False, limit_s=1.5)
SLOW = fake("slow", lambda: 0.0, chance=False)
SLOW = replace(SLOW, reproduce=slow)
LINGER = fake("linger", linger, "hang")
GPU = fake("gpu", see_gpu)
MEET, ALSO_MEET = (fake(slug, meet, chance=False) for slug in ("meet", "also-meet"))
CUDA = fake("cuda", cuda, "cuda error")
MEMORY = fake("memory", memory, "out of memory")
THREAD = fake("thread", lose_a_thread, "exception")
LEAVE = fake("leave", leave)
KILLED = fake("killed", be_killed, "signal")
NUMBER = fake("number", lambda: 3.0, chance=False)
NAN = fake("nan", lambda: float("nan"))
QUIET = fake("quiet", lambda: 0.0)


def around_step(
    make_step: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    faulty: bool,
    seed: int = 0,
) -> float:
    step, inputs = make_step("cpu")
    return float(step(*inputs).numel() + seed) if faulty else 0.0


STEPPED = replace(fake("stepped", lambda: 0.0, chance=False), reproduce_step=around_step)
