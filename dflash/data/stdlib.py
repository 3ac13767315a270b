"""The interpreter's standard library as text: which files, and which of them are held out.

This is the one place with the rule. The shipped target is trained on the "train" split, a drafter
is trained on the same split, and acceptance is measured on "heldout" text that neither has seen.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal, get_args

from dflash.errors import MissingError, UsageError

Split = Literal["train", "heldout", "all"]

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
"""Test suites would be half of the text; site-packages is not the standard library."""

HELDOUT_ONE_IN = 20


def stdlib_root() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_heldout(relative: str) -> bool:
    """Tell whether the file at this posix path below the root is held out (1 in 20 by hash)."""
    return int(hashlib.sha256(relative.encode()).hexdigest(), 16) % HELDOUT_ONE_IN == 0


def stdlib_files(split: Split, *, root: Path | None = None) -> list[Path]:
    """List the Python files of one split, sorted by their path below the root.

    Args:
        split: "train", "heldout", or "all".
        root: another folder to list by the same rule; default is the running interpreter's library.

    Raises:
        UsageError: the split has another name.
        MissingError: there is no Python source (a stripped-down interpreter).
    """
    if split not in get_args(Split):
        raise UsageError(
            f"stdlib:{split} is not a split of the standard library",
            hint="use stdlib:train, stdlib:heldout or stdlib:all",
        )
    base = stdlib_root() if root is None else root
    relatives = sorted(path.relative_to(base).as_posix() for path in base.rglob("*.py"))
    kept = [name for name in relatives if not SKIPPED_FOLDERS.intersection(name.split("/")[:-1])]
    if not kept:
        raise MissingError(
            f"no Python source below {base}",
            hint="this interpreter ships without its library's source; use another",
        )
    return [
        base / name for name in kept if split == "all" or is_heldout(name) == (split == "heldout")
    ]
