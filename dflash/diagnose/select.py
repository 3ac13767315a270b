"""Failure modes by the words of a command line."""

import difflib
from collections.abc import Sequence

from dflash.errors import UsageError
from dflash.failures import FailureMode, all_modes, all_slugs


def require_slugs(words: Sequence[str]) -> None:
    """Check that each of *words* is a failure mode or ``all``; imports no torch.

    Raises:
        UsageError: one is not; the nearest is suggested.
    """
    slugs = all_slugs()
    for word in words:
        if word not in (*slugs, "all"):
            near = difflib.get_close_matches(word, [*slugs, "all", "run"], n=1)
            raise UsageError(
                f"there is no failure mode {word!r}",
                hint=f"did you mean {near[0]}?" if near else "dflash diagnose lists them",
            )


def mode_called(slug: str) -> FailureMode:
    """The failure mode of that name.

    Raises:
        UsageError: there is none; the nearest is suggested.
    """
    require_slugs([slug])
    return next(mode for mode in all_modes() if mode.slug == slug)


def modes_called(words: Sequence[str]) -> list[FailureMode]:
    """Every mode that *words* name, once each; all of them for no word and for ``all``.

    Raises:
        UsageError: a word names none.
    """
    require_slugs(words)
    if not words or "all" in words:
        return list(all_modes())
    return [mode_called(word) for word in dict.fromkeys(words)]
