"""How much memory a process of this machine can still have, as far as Linux says so."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB = 2**30
MEMINFO = Path("/proc/meminfo")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

LIMITS = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""Of version 2 of control groups, and of version 1: the limit, what is used, and in memory.stat
what of that are pages of files, which make room when they must."""


def free_gib() -> float | None:
    """What is available, by the machine or by a control group's limit, whichever is less.

    None where the system does not say, as anywhere but on Linux.
    """
    found = [*_available(), *(room for folder in _groups() for room in _room(folder))]
    return min(found, default=None)


def _available() -> Iterator[float]:
    with suppress(OSError, ValueError):
        for line in MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024 / GIB


def _groups() -> Iterator[Path]:
    """The folder of this process's group and those around it, at both places where they can be."""
    lines: list[str] = []
    with suppress(OSError):
        lines = OWN_GROUP.read_text().splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers not in ("", "memory"):
            continue
        for top in (GROUPS, GROUPS / "memory"):
            own = top / path.lstrip("/")
            yield from (place for place in (own, *own.parents) if place.is_relative_to(top))


def _room(folder: Path) -> Iterator[float]:
    """What the limit of a group leaves; nothing where it has none."""
    for limit, used, files in LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            most, taken = (int((folder / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            kept = taken - sum(int(stat.get(name, 0)) for name in files)
            yield max(0, most - max(0, kept)) / GIB
