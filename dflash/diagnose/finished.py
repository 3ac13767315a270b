"""What a finished or crashed run left behind, as the detectors of failure modes read it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

from dflash.diagnose.findings import Launch
from dflash.records import EvalRecord, EventRecord, StepRecord

AnyRecord = StepRecord | EvalRecord | EventRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What was counted between two looks at a program; memory is that of the second look.

    Attributes:
        when: the second look, in words: "step 30", "after 412 s".
        compilations: graphs, or frames compiled again; captures: of CUDA graphs.
        pace: how fast it was meanwhile, in words, or "".
        new_device_allocs: device allocations by device.
        allocated_gib: the most that was in use so far; reserved_gib: what the allocator holds.
    """

    when: str
    compilations: int = 0
    captures: int = 0
    pace: str = ""
    new_device_allocs: Mapping[str, int] = field(default_factory=dict)
    allocated_gib: Mapping[str, float] = field(default_factory=dict)
    reserved_gib: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Records, whatever text tells of its end (stacks, tracebacks, output), the environment.

    ``stacks`` are those of its last attempt, ``unread`` says what of its files is damaged, a
    sentence each; records were ``cut`` where one of them is. A program that writes no records may
    have been watched: ``watched`` is what it did again and again after its warm-up,
    ``num_skipped`` the graphs that torch did not capture for it.
    """

    records: tuple[AnyRecord, ...] = ()
    text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    stacks: str = ""
    unread: tuple[str, ...] = ()
    cut: bool = False
    watched: tuple[Interval, ...] = ()
    num_skipped: int = 0

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def evals(self) -> list[EvalRecord]:
        return [record for record in self.records if isinstance(record, EvalRecord)]

    @property
    def attempt(self) -> tuple[AnyRecord, ...]:
        """Records since the run was last resumed."""
        return self.records[resumed_at(self.records) :]

    @property
    def undisturbed(self) -> list[tuple[StepRecord, StepRecord]]:
        """Neighbouring step records between which nothing but training happened: no evaluation,
        which compiles, captures and allocates for itself, and not the first steps."""
        measured = [record.step for record in self.evals]
        return [
            (before, after)
            for before, after in pairwise(self.steps)
            if not any(before.step <= step <= after.step for step in measured)
        ]

    @property
    def steady(self) -> list[Interval]:
        """Intervals in which nothing was left to compile or capture, if all went well."""
        return [_interval(*pair) for pair in self.undisturbed] + list(self.watched)

    @property
    def settled(self) -> list[Interval]:
        """Intervals in which nothing was left to allocate, if all went well."""
        return [_interval(*pair) for pair in pairwise(self.steps[1:])] + list(self.watched)

    def events(self, name: str) -> list[EventRecord]:
        """Events of that name, in order."""
        return [record for record in self.records if is_event(record, name)]

    def lines_with(self, *words: str) -> Iterator[str]:
        """Lines of the text that hold any of *words*, each once."""
        lines = (line.strip() for line in self.text.splitlines())
        yield from dict.fromkeys(line for line in lines if any(word in line for word in words))


def is_event(record: AnyRecord, *names: str) -> TypeGuard[EventRecord]:
    """Whether *record* is an event of one of *names*."""
    return isinstance(record, EventRecord) and record.name in names


def resumed_at(records: Sequence[AnyRecord]) -> int:
    """The place of the last event ``resumed``; 0 where there is none."""
    places = (place for place, one in enumerate(records) if is_event(one, "resumed"))
    return max(places, default=0)


def _interval(before: StepRecord, now: StepRecord) -> Interval:
    new = {
        device: count - before.device_allocs.get(device, 0)
        for device, count in now.device_allocs.items()
    }
    return Interval(
        when=f"step {now.step}",
        compilations=now.recompiles,
        captures=now.captures,
        pace=f"{now.step_s:.3f} s a step",
        new_device_allocs=new,
        allocated_gib=now.allocated_gib,
        reserved_gib=now.reserved_gib,
    )


def says(*words: str) -> Callable[[FinishedRun], Iterable[str]]:
    """A detector of lines that hold any of *words*, which must be the failure's own."""
    return lambda run: run.lines_with(*words)


def as_finished(launches: Iterable[Launch]) -> FinishedRun:
    """What launches of a failure mode left behind, in the place of a run's own end."""
    parts = [
        part
        for launch in launches
        for part in (launch.message, launch.traceback, launch.stacks, launch.stderr_tail)
    ]
    return FinishedRun(text="\n".join(parts))
