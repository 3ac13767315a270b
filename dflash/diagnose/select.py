"""Failure modes by the words of a command line."""

import difflib
from collections.abc import Sequence

from dflash.errors import UsageError
from dflash.failures import FailureMode, all_modes

ALL = "all"


def mode_called(slug: str) -> FailureMode:
    """The failure mode of that name.

    Raises:
        UsageError: there is none; the nearest is suggested.
    """
    (mode,) = _modes_of([slug])
    return mode


def modes_called(words: Sequence[str]) -> list[FailureMode]:
    """Every mode that *words* name, once each; all of them for no word and for ``all``.

    Raises:
        UsageError: words that name none, all of them; for each the nearest is suggested.
    """
    named = _modes_of([word for word in dict.fromkeys(words) if word != ALL])
    return named if named and ALL not in words else list(all_modes())


def _modes_of(slugs: Sequence[str]) -> list[FailureMode]:
    modes = {mode.slug: mode for mode in all_modes()}
    unknown = [slug for slug in slugs if slug not in modes]
    if unknown:
        near = {
            slug: found[0]
            for slug in unknown
            if (found := difflib.get_close_matches(slug, [*modes, ALL, "run"], n=1))
        }
        meant = list(dict.fromkeys(near.values()))
        raise UsageError(
            f"there is no failure mode {' or '.join(map(repr, unknown))}",
            hint=f"did you mean {' and '.join(meant)}?" if meant else "dflash diagnose lists them",
        )
    return [modes[slug] for slug in slugs]
