"""What the installed torch does with compiled code and captures in threads, by minor version.

Each fact was seen to happen on the versions named, not read off release notes.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One row of the table.

    Attributes:
        trees_belong_to: who may capture with ``mode="reduce-overhead"``. "importer": only the
            thread that imported torch's cudagraph trees first; any other dies at its first capture
            of a bare AssertionError, but may replay what that one captured. "each thread": every
            thread has a manager, a pool and captures of its own, and replays no other's.
        while_compiling: what a compilation in one thread does to the others.
    """

    trees_belong_to: Literal["importer", "each thread"]
    while_compiling: str

    @property
    def captures_in(self) -> Literal["main", "worker"]:
        """The thread in which ``warmed`` captures what a worker will replay."""
        return "main" if self.trees_belong_to == "importer" else "worker"

    def lazy_workers_die(self, num_workers: int) -> bool:
        """Whether workers that capture on first use die, all but one of them."""
        return self.trees_belong_to == "importer" and num_workers > 1


_FLAG = "compiled calls of other threads fail meanwhile (a process-wide flag of torch.fx)"
_LEAK = "is_compiling() is true in every thread meanwhile, so that eager code takes other branches"
TABLE: dict[tuple[int, int], Behaviour] = {
    (2, 9): Behaviour("importer", _FLAG),
    (2, 10): Behaviour("importer", _FLAG),
    (2, 11): Behaviour("importer", _FLAG),
    (2, 12): Behaviour("importer", _FLAG),
    (2, 13): Behaviour("each thread", _LEAK),
    (2, 14): Behaviour("each thread", _LEAK),
}


def behaviour_of(version: str) -> Behaviour:
    """Return the row of *version* ("2.11.0+cu130"); the nearest one where there is none."""
    major, minor = (int(part) for part in version.split(".")[:2])
    known = [row for row in TABLE if row <= (major, minor)]
    return TABLE[max(known, default=min(TABLE))]


def is_known(version: str) -> bool:
    """Whether *version* was tried; of one that was not, the nearest row is a guess, no promise."""
    return tuple(int(part) for part in version.split(".")[:2]) in TABLE
