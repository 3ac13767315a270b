"""Starts children, enforces their time limits, and says how each ended.

Not here: what an end means for a failure mode (``judge``).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import dflash
from dflash.diagnose.findings import End, Launch, Mark, Part, Variant
from dflash.diagnose.room import Place, Room
from dflash.readable import signal_name

GRACE_S = 5.0  # between SIGABRT, at which faulthandler writes the stacks, and SIGKILL
POLL_S = 0.02
TAIL_CHARS = 4000
STACKS_CHARS = 12000
MAX_MARKS = 2000
STACK_STARTS = ("Fatal Python error:", "Current thread 0x", "Thread 0x")
MEMORY = ("out of memory", "bad_alloc", "cannot allocate memory", "not enough memory")
CUDA = ("CUDA error", "cuDNN error", "NCCL error", "CUDA driver error", "cudaError")
ROOT = Path(dflash.__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch to make.

    ``hang_s`` is after how long it counts as hung; a shorter ``time_limit_s`` only ends it.
    """

    address: str
    variant: Variant
    seed: int = 0
    part: Part = "whole"
    time_limit_s: float = 60.0
    hang_s: float = 0.0
    step: str = ""
    num_gpus: int = 0


@dataclass(slots=True)
class _Child:
    order: Order
    folder: Path
    process: "subprocess.Popen[bytes]"
    begun_ns: int = field(default_factory=time.monotonic_ns)
    aborted: bool = False
    job: int = 0
    gpus: Place = ()

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.begun_ns) / 1e9


@dataclass(slots=True)
class _Job:
    rounds: Iterator[Sequence[Order]]
    waiting: deque[Order] = field(default_factory=deque)
    num_running: int = 0
    over: bool = False

    def take(self, room: Room) -> tuple[Order, Place] | None:
        """Its next launch, if it has one and there is room for it."""
        if not (self.waiting or self.num_running or self.over):
            orders = next(self.rounds, None)
            self.over = orders is None
            self.waiting.extend(orders or ())
        place = room.take(self.waiting[0].num_gpus) if self.waiting else None
        return None if place is None else (self.waiting.popleft(), place)


def run_orders(orders: Iterable[Order], *, width: int = 1) -> Generator[Launch]:
    """Make every launch, *width* at a time, and yield each as it ends."""
    with closing(run_jobs([iter([list(orders)])], Room(width))) as running:
        for _, launch in running:
            yield launch


def run_jobs(
    jobs: Sequence[Iterator[Sequence[Order]]], room: Room
) -> Generator[tuple[int, Launch]]:
    """Make the launches of every job, as many at a time as *room* has place for.

    A job is asked for its next launches once all of its last ones were yielded, with its number,
    each as it ends. No child outlives the iteration, whether it ends, is closed or is interrupted;
    nor this process.
    """
    queue, running, places = [_Job(job) for job in jobs], list[_Child](), count()
    folder = Path(tempfile.mkdtemp(prefix="dflash-diagnose-"))
    try:
        while not all(job.over for job in queue):
            for number, job in enumerate(queue):
                while (taken := job.take(room)) is not None:
                    order, gpus = taken
                    started = _start(order, folder / str(next(places)), gpus=room.visible(gpus))
                    if isinstance(started, Launch):
                        room.give_back(gpus)
                        yield number, started
                    else:
                        started.job, started.gpus = number, gpus
                        running.append(started)
                        job.num_running += 1
            if running:
                child = _next_to_end(running)
                launch = _launch_of(child)
                running.remove(child)
                queue[child.job].num_running -= 1
                room.give_back(child.gpus)
                yield child.job, launch
    finally:
        for child in running:
            _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def _start(order: Order, folder: Path, *, gpus: str) -> _Child | Launch:
    folder.mkdir()
    words = [sys.executable, "-m", "dflash.diagnose.child", order.address]
    words += ["--variant", order.variant, "--part", order.part, "--seed", str(order.seed)]
    words += ["--result", str(folder / "result.json"), "--timeline", str(folder / "marks.jsonl")]
    words += ["--parent", str(os.getpid())]
    words += ["--step", order.step] if order.step else []
    with (folder / "stderr").open("wb") as stderr:
        try:
            process = subprocess.Popen(  # noqa: S603 - this very interpreter and package
                words,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=subprocess.STDOUT,
                env=_environment(gpus),
                start_new_session=True,
            )
        except OSError as error:
            message = f"{sys.executable} cannot be started: {error.strerror or error}"
            return Launch(
                variant=order.variant, seed=order.seed, end="not started", message=message
            )
    return _Child(order, folder, process)


def _environment(gpus: str) -> dict[str, str]:
    """This process's, with faulthandler on from the first line and this package importable.

    Without *gpus*, as CUDA_VISIBLE_DEVICES lists them, a child sees all that this process sees.
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    if "site-packages" not in ROOT.parts:
        paths = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _next_to_end(running: list[_Child]) -> _Child:
    while True:
        for child in running:
            if child.process.poll() is not None:
                return child
            if not child.aborted and child.age_s > child.order.time_limit_s:
                child.aborted = True
                child.process.send_signal(signal.SIGABRT)
            if child.age_s > child.order.time_limit_s + GRACE_S:
                return child
        time.sleep(POLL_S)


def _end(child: _Child) -> None:
    """Kill the child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def _launch_of(child: _Child) -> Launch:
    wall_s = child.age_s
    code = child.process.poll()
    _end(child)
    written = (child.folder / "stderr").read_text(encoding="utf-8", errors="replace")
    result_file = child.folder / "result.json"
    result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.exists() else {}
    end, told = _how_it_ended(child, code, result)
    return Launch(
        variant=child.order.variant,
        seed=child.order.seed,
        end=end,
        wall_s=round(wall_s, 3),
        stacks=_stacks(written),
        stderr_tail=written[-TAIL_CHARS:],
        marks=list(_marks(child)),
        **told,
    )


def _how_it_ended(
    child: _Child, code: int | None, result: dict[str, Any]
) -> tuple[End, dict[str, Any]]:
    if child.aborted:
        return _at_its_limit(child.order)
    error = result if "error" in result else next(iter(result.get("thread_errors", ())), None)
    if error is not None:
        told = {"message": error["error"], "thread": error["thread"]}
        told |= {"traceback": error["traceback"], "value": result.get("value")}
        early = result.get("stage") == "load"
        return ("not started" if early else _kind_of(error["type"], error["error"])), told
    if "value" in result:
        return "number", {"value": result["value"]}
    if code is not None and code < 0:
        name = signal_name(-code)
        outside = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        return ("killed" if outside else "signal"), {"message": name}
    if not (child.folder / "marks.jsonl").exists():
        return "not started", {"message": f"ended with code {code} before it began"}
    return "exception", {"message": f"ended with code {code} and without a result"}


def _at_its_limit(order: Order) -> tuple[End, dict[str, Any]]:
    message = f"no end within {order.time_limit_s:g} s"
    if order.time_limit_s >= order.hang_s:
        return "hang", {"message": message}
    why = f"{message}, of the {order.hang_s:g} s after which it counts as hung"
    return "killed", {"message": why}


def _kind_of(name: str, text: str) -> End:
    if name in ("OutOfMemoryError", "MemoryError") or any(w in text.lower() for w in MEMORY):
        return "out of memory"
    if name == "AcceleratorError" or any(word in text for word in CUDA):
        return "cuda error"
    return "exception"


def _stacks(written: str) -> str:
    starts = [place for mark in STACK_STARTS if (place := written.find(mark)) >= 0]
    return written[min(starts) :][:STACKS_CHARS] if starts else ""


def _marks(child: _Child) -> Iterator[Mark]:
    path = child.folder / "marks.jsonl"
    lines = path.read_bytes().splitlines()[:MAX_MARKS] if path.exists() else []
    for line in lines:
        try:
            read = json.loads(line)
        except ValueError:  # torn by the crash
            continue
        at_s = round((read["ns"] - child.begun_ns) / 1e9, 6)
        yield Mark(kind=read["kind"], thread=read["thread"], at_s=at_s, detail=read["detail"])
