"""Failure modes by the words of a command line."""

import difflib
from collections.abc import Sequence

from dflash.errors import UsageError
from dflash.failures import FailureMode, all_modes


def mode_called(slug: str) -> FailureMode:
    """The failure mode of that name.

    Raises:
        UsageError: there is none; the nearest is suggested.
    """
    modes = {mode.slug: mode for mode in all_modes()}
    if slug not in modes:
        near = difflib.get_close_matches(slug, [*modes, "all", "run"], n=1)
        raise UsageError(
            f"there is no failure mode {slug!r}",
            hint=f"did you mean {near[0]}?" if near else "dflash diagnose lists them",
        )
    return modes[slug]


def modes_called(words: Sequence[str]) -> list[FailureMode]:
    """Every mode that *words* name, once each; all of them for no word and for ``all``."""
    if not words or "all" in words:
        return list(all_modes())
    return [mode_called(word) for word in dict.fromkeys(words)]
