"""The watchdog: silence for too long leaves every thread's stack in a file and ends the run."""

import faulthandler
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from dflash.errors import HangError
from dflash.pipeline.lifeline import Lifeline

GRACE_S = 10.0
"""How much longer than the limit the main thread may be unable to run before the last resort."""


class Watch:
    """Raises when nobody beats; used by the main thread alone, which looks again and again.

    Where the main thread cannot run either (a thread hangs in a call that never gives the
    interpreter back), faulthandler's own thread writes the stacks and ends the process with code 1:
    no Python can run then, so there is no choice of the code.
    """

    def __init__(self, life: Lifeline, *, limit_s: float, stacks_file: Path | None) -> None:
        self._life = life
        self._limit_s = limit_s
        self._stacks_file = stacks_file
        self._out: TextIO = sys.__stderr__ or sys.stderr
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._stacks_file is not None:
            self._out = self._open.enter_context(self._stacks_file.open("w"))
            if not faulthandler.is_enabled():  # else whoever enabled it chose its place
                faulthandler.enable(file=self._out)  # a crash leaves its stacks there
                self._open.callback(faulthandler.disable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._open.close()
        if self._stacks_file is not None and self._stacks_file.stat().st_size == 0:
            self._stacks_file.unlink()

    def look(self) -> None:
        """Say that the main thread runs, and see whether any worker beat within the limit.

        Raises:
            HangError: none did; the stacks of all threads have been written.
        """
        faulthandler.dump_traceback_later(self._limit_s + GRACE_S, exit=True, file=self._out)
        if self._life.silent_s <= self._limit_s:
            return
        for thread in threading.enumerate():
            self._out.write(f"thread 0x{thread.ident or 0:016x} is {thread.name}\n")
        self._out.flush()
        faulthandler.dump_traceback(file=self._out, all_threads=True)
        raise HangError(
            f"no thread of the pipeline made progress for {self._limit_s:g} s; the stacks of all"
            f" threads are in {self._stacks_file or 'the output above'}",
            hint="raise --watchdog if a step really takes that long; else look for a lock or a CUDA"
            " call that every stack waits in",
        )
