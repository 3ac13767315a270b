"""Starts children, enforces their time limits, and says how each ended.

Not here: what an end means for a failure mode (``judge``).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import dflash
from dflash.diagnose.findings import End, Launch, Mark, Part, Variant

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
    """One launch to make."""

    address: str
    variant: Variant
    seed: int = 0
    part: Part = "whole"
    time_limit_s: float = 60.0
    step: str = ""


@dataclass(slots=True)
class _Child:
    order: Order
    folder: Path
    process: "subprocess.Popen[bytes]"
    begun_ns: int = field(default_factory=time.monotonic_ns)
    aborted: bool = False

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.begun_ns) / 1e9


def run_orders(orders: Iterable[Order], *, width: int = 1) -> Generator[Launch]:
    """Make every launch, *width* at a time, and yield each as it ends.

    No child outlives the iteration, whether it ends, is closed or is interrupted; nor this process.
    """
    waiting, running, places = deque(orders), list[_Child](), count()
    folder = Path(tempfile.mkdtemp(prefix="dflash-diagnose-"))
    try:
        while waiting or running:
            while waiting and len(running) < width:
                started = _start(waiting.popleft(), folder / str(next(places)))
                if isinstance(started, Launch):
                    yield started
                else:
                    running.append(started)
            if running:
                child = _next_to_end(running)
                running.remove(child)
                yield _launch_of(child)
    finally:
        for child in running:
            _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def _start(order: Order, folder: Path) -> _Child | Launch:
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
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            message = f"{sys.executable} cannot be started: {error.strerror or error}"
            return Launch(
                variant=order.variant, seed=order.seed, end="not started", message=message
            )
    return _Child(order, folder, process)


def _environment() -> dict[str, str]:
    """This process's, with faulthandler on from the first line and this package importable."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
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
    with contextlib.suppress(ProcessLookupError):
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
        return "hang", {"message": f"no end within {child.order.time_limit_s:g} s"}
    error = result if "error" in result else next(iter(result.get("thread_errors", ())), None)
    if error is not None:
        told = {"message": error["error"], "thread": error["thread"]}
        told |= {"traceback": error["traceback"], "value": result.get("value")}
        early = result.get("stage") == "load"
        return ("not started" if early else _kind_of(error["type"], error["error"])), told
    if "value" in result:
        return "number", {"value": result["value"]}
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        outside = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        return ("killed" if outside else "signal"), {"message": name}
    if not (child.folder / "marks.jsonl").exists():
        return "not started", {"message": f"ended with code {code} before it began"}
    return "exception", {"message": f"ended with code {code} and without a result"}


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
