"""A training run as it goes on: a live screen, plain lines, JSON lines, or nothing."""

import sys
import time
from typing import Literal, Protocol, Self, TextIO, get_args

from dflash.errors import UsageError
from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.report.lines import record_line, time_left

ProgressKind = Literal["auto", "rich", "plain", "json", "none"]
AnyRecord = StepRecord | EvalRecord | EventRecord


class Sink(Protocol):
    """Takes the records of a run, in order, from one thread."""

    def write(self, record: AnyRecord) -> None: ...

    def close(self) -> None: ...


class Progress:
    """A sink for people; also says what has no record. Silent by itself, the kinds speak.

    As a context manager it closes itself, so that a screen is taken down before an error shows.
    """

    def write(self, record: AnyRecord) -> None:
        """Show a record."""

    def say(self, text: str) -> None:
        """Show a sentence."""

    def expect(self, total_steps: int) -> None:
        """Learn the length of the run, once the data has told it."""

    def close(self) -> None:
        """Stop showing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_progress(
    kind: ProgressKind = "auto", *, total_steps: int | None = None, stream: TextIO | None = None
) -> Progress:
    """The progress of *kind*; ``auto`` is rich on a terminal that can move its cursor, else plain.

    Args:
        total_steps: length of the run, for the time left.
        stream: stderr if not given; ``json`` belongs on stdout, and its caller says so.

    Raises:
        UsageError: there is no such kind.
    """
    stream = sys.stderr if stream is None else stream
    if kind not in get_args(ProgressKind):
        raise UsageError(f"--progress {kind}: must be one of {', '.join(get_args(ProgressKind))}")
    if kind == "rich" or (kind == "auto" and _can_draw(stream)):
        from dflash.report.screen import ScreenProgress

        return ScreenProgress(stream, total_steps=total_steps)
    if kind in ("auto", "plain"):
        return PlainProgress(stream, total_steps=total_steps)
    return JsonProgress(stream) if kind == "json" else Progress()


def _can_draw(stream: TextIO) -> bool:
    if not stream.isatty():
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal


class PlainProgress(Progress):
    """One line a record, without control codes."""

    def __init__(self, stream: TextIO, *, total_steps: int | None) -> None:
        self._stream = stream
        self._clock = RunClock(total_steps)

    def write(self, record: AnyRecord) -> None:
        left = self._clock.left_s(record) if isinstance(record, StepRecord) else None
        self.say(record_line(record, total_steps=self._clock.total_steps) + time_left(left))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def expect(self, total_steps: int) -> None:
        self._clock.total_steps = total_steps


class JsonProgress(Progress):
    """Each record as the line that ``records.jsonl`` holds; sentences go to stderr."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, record: AnyRecord) -> None:
        print(record.model_dump_json(), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


class RunClock:
    """How long the rest of a run takes at the pace since the first record seen."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._first: tuple[int, float] | None = None

    def left_s(self, record: StepRecord) -> float | None:
        """Seconds, or None while there is no pace yet or no end."""
        now = time.monotonic()
        if self._first is None:
            self._first = (record.step, now)
        steps = record.step - self._first[0]
        if self.total_steps is None:
            return None
        step_s = (now - self._first[1]) / steps if steps > 0 else record.step_s
        return step_s * max(self.total_steps - record.step, 0) if step_s > 0 else None
