"""What an observer wrote about one process, and what of it is news after warm-up.

A program that is well compiles, captures and allocates while it warms up, and may once more later,
at its first evaluation for example. So only what comes again and again after it had settled counts.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dflash.diagnose.finished import Interval

QUIET_S = 60.0
"""So long without a compilation, a capture or a device allocation: warm-up is over."""
MOMENT_S = 10.0
"""What comes within so many seconds is one event: an evaluation may well compile two graphs."""
AGAIN_AND_AGAIN = 3
GIB = 1 << 30
MIN_WASTE_GIB, MIN_GROWTH, MUCH = 1.0, 1.25, 2.0
"""Reserved but never used at the end; reserved at the end over when it had settled, and over the
most that was ever in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one process had counted ``at_s`` seconds after the watched program began."""

    at_s: float
    compiled: int = 0
    recompiled: int = 0
    skipped: int = 0
    captures: dict[str, int] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_captures(self) -> int:
        return sum(self.captures.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception that ended a thread; ``thread`` is None where nobody knows which."""

    thread: str | None
    is_main: bool
    text: str


@dataclass(slots=True, kw_only=True)
class Observed:
    """One Python process; ``torch`` is the version that it imported, or ""."""

    pid: int
    argv: list[str]
    python: str
    began_s: float = 0.0
    torch: str = ""
    counts: list[Counts] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def last(self) -> Counts:
        """The most that was counted; dynamo's own counts begin anew where a program resets it."""
        if not self.counts:
            return Counts(at_s=0.0)
        most = {
            name: max(getattr(each, name) for each in self.counts)
            for name in ("compiled", "recompiled", "skipped")
        }
        last = self.counts[-1]
        return Counts(at_s=last.at_s, captures=last.captures, memory=last.memory, **most)

    def news(self) -> Iterator[Interval]:
        """Compilations and captures, then memory, that came again and again after warm-up."""
        yield from _late(self.counts)
        for device in self.last.memory:
            yield from _growth(self.counts, device)


def read_observed(folder: Path, *, begun_s: float) -> list[Observed]:
    """Every process that was observed, in the order of their start.

    ``begun_s`` is when the program began, by ``time.monotonic``. A line that the end of a process
    tore is left out.
    """
    read = [_process(path, begun_s) for path in folder.glob("*.jsonl")]
    return sorted(read, key=lambda each: each.began_s)


def _process(path: Path, begun_s: float) -> Observed:
    found = Observed(pid=int(path.stem), argv=[], python="")
    for line in _lines(path):
        kind, at_s = line.pop("kind"), round(line.pop("s") - begun_s, 3)
        if kind == "process":
            found.argv, found.python, found.began_s = line["argv"], line["python"], at_s
        elif kind == "torch":
            found.torch = line["version"]
        elif kind == "counts":
            found.counts.append(Counts(at_s=at_s, **line))
        elif kind == "failed":
            found.failed.append(Failed(**line))
        elif kind == "broken":
            found.broken.append(line["error"])
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def _late(counts: Sequence[Counts]) -> Iterator[Interval]:
    made = [
        (
            after.at_s,
            max(0, after.recompiled - before.recompiled),
            max(0, after.num_captures - before.num_captures),
        )
        for before, after in pairwise((Counts(at_s=0.0), *counts))
        if after.compiled != before.compiled
        or after.recompiled != before.recompiled
        or after.num_captures != before.num_captures
    ]
    settled_s = _settled_s([at_s for at_s, _, _ in made])
    late = _moments([one for one in made if one[0] > settled_s and (one[1] or one[2])])
    if len(late) < AGAIN_AND_AGAIN:
        return
    for moment in late:
        compilations, captures = (sum(one[place] for one in moment) for place in (1, 2))
        yield Interval(
            when=f"after {moment[-1][0]:.0f} s", compilations=compilations, captures=captures
        )


def _growth(counts: Sequence[Counts], device: str) -> Iterator[Interval]:
    seen = [(each.at_s, each.memory[device]) for each in counts if device in each.memory]
    grown = [
        (now_s, now["device_allocs"] - before["device_allocs"], now["reserved"])
        for (_, before), (now_s, now) in pairwise(seen)
        if now["device_allocs"] > before["device_allocs"] and now["reserved"] > before["reserved"]
    ]
    begun_s = seen[0][0]
    late = _moments([one for one in grown if one[0] > begun_s + QUIET_S])
    used = max(memory["allocated"] for _, memory in seen) / GIB
    settled = max(m["reserved"] for at_s, m in seen if at_s <= begun_s + QUIET_S) / GIB
    held = seen[-1][1]["reserved"] / GIB
    grows = held >= MIN_GROWTH * settled and held > MUCH * used and held - used >= MIN_WASTE_GIB
    if not grows or len(late) < AGAIN_AND_AGAIN:
        return
    for moment in late:
        yield Interval(
            when=f"after {moment[-1][0]:.0f} s",
            new_device_allocs={device: sum(num for _, num, _ in moment)},
            allocated_gib={device: used},
            reserved_gib={device: moment[-1][2] / GIB},
        )


def _settled_s(times: Sequence[float]) -> float:
    """When the first QUIET_S without any of *times* begin."""
    for before, after in pairwise(times):
        if after - before >= QUIET_S:
            return before
    return times[-1] if times else 0.0


def _moments(events: Sequence[Any]) -> list[list[Any]]:
    """Events, each with its time first, that come shortly after one another together."""
    moments: list[list[Any]] = []
    for event in events:
        if moments and event[0] - moments[-1][-1][0] < MOMENT_S:
            moments[-1].append(event)
        else:
            moments.append([event])
    return moments
