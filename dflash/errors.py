"""Every error a user can meet: what happened and where, what to do next, which exit code.

The codes are the command line's contract; ``dflash.cli.__main__`` is the one place that turns an
error into a message and an exit status.
"""

import errno
import re


class DflashError(Exception):
    """Base of all user-facing errors; the command line prints it without a traceback.

    Args:
        what: one sentence without a full stop that names the value that was wrong and the rule.
        hint: the next thing the reader should do, or "" if there is nothing to say.
    """

    exit_code = 2
    threads_left = False
    """Set where a thread could not be ended: the process must leave without tidying up, since the
    interpreter's own end could wait for that thread, or crash under it."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what if not hint else f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint


class UsageError(DflashError):
    """A command was called with words that make no sense (unknown device, bad option value)."""


class ConfigError(DflashError):
    """A configuration file or override is wrong. Raised once, listing every problem found."""


class MissingError(DflashError):
    """Something required is not there: a model, an extra package, a GPU."""

    exit_code = 3


class HangError(DflashError):
    """The watchdog stopped a run in which nothing moved any more."""

    exit_code = 5


class ReplicasDifferError(DflashError):
    """Replicas of one drafter no longer hold the same bits."""

    exit_code = 1


class NonFiniteError(DflashError):
    """A loss or gradient norm was NaN or infinite; the optimizer did not move."""

    exit_code = 10


class DeviceMemoryError(DflashError):
    """A device ran out of memory, or is predicted to."""

    exit_code = 11


class DataError(DflashError):
    """Input data breaks a stated rule (format, token range, too many bad rows, empty)."""

    exit_code = 12


class CheckpointError(DflashError):
    """A checkpoint is damaged, foreign, of another version, or contradicts the configuration."""

    exit_code = 13


class WorkerDiedError(DflashError):
    """A pipeline thread ended with an exception; carries that thread's name and traceback."""

    exit_code = 14


INTERNAL_EXIT = 70
"""A bug of ours; a crash file was written."""

STOPPED_EXIT = 75
"""Stopped by a signal after a complete checkpoint; the same command goes on from there."""

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space within the quota",
    errno.EACCES: "get the right to write there",
    errno.EPERM: "get the right to write there",
    errno.EROFS: "make that file system writable",
    errno.EEXIST: "move away what is in its place",
    errno.ENOTEMPTY: "move away what is in its place",
    errno.ENOTDIR: "move away what is in its place",
    errno.EISDIR: "move away what is in its place",
    errno.ENOENT: "see what removed its folder",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def reason(error: Exception) -> str:
    """What the file system says; *error* may be a library's own, with the system's text in it."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def remedy(error: Exception) -> str:
    """What the reader should do about an *error* of the file system, by its number."""
    told = re.search(r"\(os error (\d+)\)", str(error))  # as Rust writes it, so safetensors too
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    return _REMEDIES.get(number or 0, "see to what the system reports")
