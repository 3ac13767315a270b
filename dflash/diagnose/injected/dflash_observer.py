"""Looks at the process that it was put into, and writes down what changes; standard library only.

The program must not notice: nothing is imported for it, no thread shows in ``threading``, hooks
call what was there before, files are open only while they are written. One JSON object a line in
``FOLDER/PID.jsonl`` (``kind``: process, torch, counts, failed, signal, broken); stacks, on SIGUSR1,
in ``FOLDER/PID.stacks``. Not here: what any of it means.
"""

import _thread
import atexit
import contextlib
import faulthandler
import fcntl
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

EVERY_S, MEMORY_EVERY = 1.0, 5
HIGH_FD = 200  # the program's own files keep the numbers that they would have
MAX_CHARS = 20_000


def begin(folder: str) -> None:
    """Observe this process from here on: counters once it has imported torch, stacks at once."""
    observer = Observer(folder)
    observer.write("process", pid=os.getpid(), argv=sys.orig_argv, python=sys.version.split()[0])
    observer.listen()
    if "torch" in sys.modules:
        observer.torch_is_there()
    else:
        sys.meta_path.insert(0, WhenTorchIsThere(observer))


class WhenTorchIsThere:
    """A finder that finds nothing itself: it follows torch through the others, and then leaves."""

    def __init__(self, observer: "Observer") -> None:
        self.observer = observer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ANN401
        """What the other finders find for torch, whose loader will tell."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                with contextlib.suppress(AttributeError, TypeError):  # loaders that cannot be told
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:  # noqa: ANN401 - anything that loads
        execute = loader.exec_module

        def exec_module(module: Any) -> None:  # noqa: ANN401 - torch
            del loader.exec_module
            execute(module)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
                self.observer.torch_is_there()

        loader.exec_module = exec_module


class Observer:
    """What is written about one process; a fork of it writes nothing."""

    def __init__(self, folder: str) -> None:
        self._pid = os.getpid()
        self._beside = f"{folder}/{self._pid}"
        self._captures: dict[str, int] = {}
        self._last: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}
        self._full: set[int] = set()
        self._looks = 0
        self._stop, self._stopped = _thread.allocate_lock(), _thread.allocate_lock()
        self._usr1: Any = None

    def write(self, kind: str, **facts: Any) -> None:  # noqa: ANN401 - anything that is JSON
        """Append one line; without the folder, whose watcher is gone, nothing."""
        if os.getpid() != self._pid:
            return
        line = json.dumps({"kind": kind, "s": time.monotonic(), **facts}) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(f"{self._beside}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def listen(self) -> None:
        """Write the stacks of all threads on SIGUSR1, unless the signal has a meaning already.

        The one thing that differs for the program: the signal does not end it, as long as it has no
        use for it. A handler that it sets later takes the place of this one.
        """
        self._usr1 = signal.getsignal(signal.SIGUSR1)
        if self._usr1 != signal.SIG_DFL:
            return
        with contextlib.suppress(OSError, RuntimeError):
            file = os.open(f"{self._beside}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            kept = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
            os.close(file)
            faulthandler.register(signal.SIGUSR1, file=kept, all_threads=True)
            self.write("signal", free=True)

    def torch_is_there(self) -> None:
        """Count and listen to what ends threads, from a thread that ``threading`` knows not of."""
        try:
            torch = sys.modules["torch"]
            self.write("torch", version=str(torch.__version__))
            self._count_captures(torch.cuda.CUDAGraph)
            self._hear_failures()
        except Exception as error:  # noqa: BLE001 - the program goes on unobserved, and it is said
            self.write("broken", error=repr(error))
            return
        self._stop.acquire()
        self._stopped.acquire()
        atexit.register(self._finish)
        _thread.start_new_thread(self._watch, ())

    def _watch(self) -> None:
        sees = self._look()
        while not self._stop.acquire(timeout=EVERY_S):
            sees = sees and self._look()
        self._stopped.release()

    def _finish(self) -> None:
        """Look a last time when the interpreter ends."""
        if os.getpid() == self._pid:
            self._stop.release()
            self._stopped.acquire(timeout=EVERY_S)
            self._looks = 0
            self._look()

    def _look(self) -> bool:
        """Write what has changed; whether there was anything to look at that it knows."""
        try:
            if self._looks % MEMORY_EVERY == 0:
                self._memory = self._memory_stats()
            self._looks += 1
            found = {**_compilations(), "captures": dict(self._captures), "memory": self._memory}
            if found != self._last:
                self._last = found
                self.write("counts", **found)
            handler = signal.getsignal(signal.SIGUSR1)
            if handler is not self._usr1:
                self._usr1 = handler
                self.write("signal", free=False)
        except Exception as error:  # noqa: BLE001 - another torch than it was written for
            self.write("broken", error=repr(error))
            return False
        return True

    def _memory_stats(self) -> dict[str, Any]:
        """By device: bytes reserved now, the peak allocated, device allocations so far.

        Reading takes the allocator's lock, under which an allocation that failed may wait for the
        device: one that has failed before is not asked again.
        """
        cuda = sys.modules["torch"].cuda
        found = dict(self._memory)
        if not cuda.is_initialized():
            return found
        for number in range(len(cuda.default_generators)):
            if number in self._full:
                continue
            stats = cuda.memory_stats(number)
            if stats.get("num_alloc_retries"):
                self._full.add(number)
            if stats.get("num_device_alloc"):
                found[f"cuda:{number}"] = {
                    "reserved": stats["reserved_bytes.all.current"],
                    "allocated": stats["allocated_bytes.all.peak"],
                    "device_allocs": stats["num_device_alloc"],
                }
        return found

    def _count_captures(self, graph_type: Any) -> None:  # noqa: ANN401 - torch.cuda.CUDAGraph
        captures, begin_one = self._captures, graph_type.capture_begin

        @functools.wraps(begin_one)
        def capture_begin(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's own
            thread = _label()
            captures[thread] = captures.get(thread, 0) + 1
            return begin_one(*arguments, **options)

        graph_type.capture_begin = capture_begin

    def _hear_failures(self) -> None:
        of_main, of_thread = sys.excepthook, threading.excepthook

        def main_hook(kind: Any, error: Any, trace: Any) -> None:  # noqa: ANN401 - Python's own
            self._failed(kind, error, trace)
            of_main(kind, error, trace)

        def thread_hook(args: "threading.ExceptHookArgs") -> None:
            if args.exc_type is not SystemExit:
                self._failed(args.exc_type, args.exc_value, args.exc_traceback)
            of_thread(args)

        sys.excepthook, threading.excepthook = main_hook, thread_hook

    def _failed(self, kind: Any, error: Any, trace: Any) -> None:  # noqa: ANN401 - Python's own
        with contextlib.suppress(Exception):  # an exception that cannot be printed, even
            text = "".join(traceback.format_exception(kind, error, trace))[-MAX_CHARS:]
            is_main = _thread.get_ident() == threading.main_thread().ident
            self.write("failed", thread=_label(), is_main=is_main, text=text)


def _compilations() -> dict[str, int]:
    """Graphs compiled, frames compiled again, graphs not captured; read, never made."""
    counters = getattr(_loaded("torch._dynamo.utils"), "counters", {})
    frames = getattr(_loaded("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    return {
        "compiled": counters.get("stats", {}).get("unique_graphs", 0),
        "recompiled": sum(count - 1 for count in list(frames.values()) if count > 1),
        "skipped": counters.get("inductor", {}).get("cudagraph_skips", 0),
    }


def _loaded(name: str) -> Any:  # noqa: ANN401 - a module or None
    """A module that is there to its last line."""
    module = sys.modules.get(name)
    half = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if half else module


def _label() -> str:
    """The calling thread's name and number; asking for its object could make one."""
    number = _thread.get_ident()
    thread = getattr(threading, "_active", {}).get(number)
    return f"{thread.name if thread else 'a thread'} ({number})"
