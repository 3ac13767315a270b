"""The processes of a group and what they have done so far, as /proc tells it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
ENDED = "ZX"


class Member(NamedTuple):
    """A process that runs; ``written`` counts bytes to files, pipes and terminals."""

    pid: int
    cpu_s: float
    written: int


def can_be_seen() -> bool:
    """Whether this system tells what processes do."""
    return (PROC / "self" / "io").exists()


def members(group: int) -> Iterator[Member]:
    """Processes of *group*, without those that have ended and that nobody has waited for."""
    per_s = os.sysconf("SC_CLK_TCK")
    for place in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (place / "stat").read_text().rpartition(")")[2].split()
            if int(words[2]) == group and words[0] not in ENDED:
                cpu_s = sum(map(int, words[11:15])) / per_s  # its own, and of children it has ended
                facts = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
                yield Member(int(place.name), cpu_s, int(facts["wchar"]))
