"""One launch of a failure mode: ``python -m dflash.diagnose.child SLUG --variant faulty ...``.

Leaves one JSON object in the result file, written beside and renamed: ``{"value": number}`` or
``{"error": .., "type": .., "thread": .., "traceback": .., "stage": ..}``; ``thread_errors`` lists
what ended other threads. A child that ends without that file crashed, hung or was killed.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from dflash.diagnose import timeline
from dflash.diagnose.user_step import theirs

PR_SET_PDEATHSIG = 1
MAX_THREAD_ERRORS = 8


def main() -> NoReturn:
    words = _words()
    stay_with(words.parent)
    faulthandler.enable(all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lost: list[dict[str, str]] = []
    threading.excepthook = lambda args: _note(args, lost)
    timeline.start(words.timeline)
    result: dict[str, Any] = {}
    stage = "load"
    try:
        program = _program(words)
        stage = "run"
        result = {"value": program()}
    except BaseException as error:  # noqa: BLE001 - however it ends, it is evidence
        frames = theirs(error) if words.variant == "own" else error.__traceback__
        told = _described(error, threading.current_thread().name, frames)
        result = {**told, "stage": stage}
        timeline.mark("fail", error=result["error"])
    _write(words.result, {**result, "thread_errors": lost[:MAX_THREAD_ERRORS]})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a failure may hang, and the interpreter's own end would wait for them


def find_mode(address: str) -> Any:  # noqa: ANN401 - a FailureMode, whose import would bring torch
    """The failure mode called *address*: its slug, or ``module:NAME`` of one that is elsewhere."""
    if ":" in address:
        module, name = address.split(":")
        return getattr(import_module(module), name)
    return import_module(f"dflash.failures.{address.replace('-', '_')}").MODE


def _program(words: argparse.Namespace) -> Callable[[], float]:
    if words.step:
        from dflash.diagnose.user_step import program_with_step

        stepped: Callable[[], float] = program_with_step(words)
        return stepped
    mode = find_mode(words.address)
    reproduce = mode.part_on_cpu if words.part == "cpu" else mode.reproduce
    if words.variant == "control":
        return lambda: float(mode.control(seed=words.seed))
    return lambda: float(reproduce(faulty=words.variant == "faulty", seed=words.seed))


def _note(args: "threading.ExceptHookArgs", lost: list[dict[str, str]]) -> None:
    """Keep what ended a thread, and show it as Python would."""
    if args.exc_value is None:
        return
    name = args.thread.name if args.thread else ""
    lost.append(_described(args.exc_value, name, args.exc_value.__traceback__))
    timeline.mark("fail", error=lost[-1]["error"])
    traceback.print_exception(args.exc_value)


def _described(error: BaseException, thread: str, frames: TracebackType | None) -> dict[str, str]:
    return {
        "type": type(error).__name__,
        "error": f"{type(error).__name__}: {error}".removesuffix(": "),
        "thread": thread,
        "traceback": "".join(traceback.format_exception(type(error), error, frames)),
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(json.dumps(value), encoding="utf-8")
    beside.replace(path)


def stay_with(parent: int) -> None:
    """Die when *parent* does, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dflash.diagnose.child", description=__doc__)
    parser.add_argument("address", help="slug, or module:NAME of a failure mode")
    parser.add_argument("--variant", choices=("own", "faulty", "sound", "control"), required=True)
    parser.add_argument("--part", choices=("whole", "cpu"), default="whole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--timeline", type=Path, default=Path(os.devnull))
    parser.add_argument("--parent", type=int, default=0, help="process to die with; 0: none")
    parser.add_argument("--step", default="", help="module:make_step of a user's own step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
