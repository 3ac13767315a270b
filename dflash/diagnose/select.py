"""Failure modes by the words of a command line."""

import difflib
from collections.abc import Sequence

from dflash.errors import UsageError
from dflash.failures import FailureMode, all_modes, all_slugs

ALL = "all"


def require_slugs(words: Sequence[str]) -> None:
    """Check that each of *words* is a failure mode or ``all``; imports no torch.

    Raises:
        UsageError: words that are not, all of them; for each the nearest is suggested.
    """
    known = [*all_slugs(), ALL]
    unknown = [word for word in dict.fromkeys(words) if word not in known]
    if not unknown:
        return
    near = [difflib.get_close_matches(word, [*known, "run"], n=1) for word in unknown]
    meant = list(dict.fromkeys(found[0] for found in near if found))
    raise UsageError(
        f"there is no failure mode {' or '.join(map(repr, unknown))}",
        hint=f"did you mean {' and '.join(meant)}?" if meant else "dflash diagnose lists them",
    )


def mode_called(slug: str) -> FailureMode:
    """The failure mode of that name.

    Raises:
        UsageError: there is none; the nearest is suggested.
    """
    require_slugs([slug])
    if slug == ALL:
        raise UsageError(f"{slug!r} is not one failure mode", hint="dflash diagnose lists them")
    return next(mode for mode in all_modes() if mode.slug == slug)


def modes_called(words: Sequence[str]) -> list[FailureMode]:
    """Every mode that *words* name, once each; all of them for no word and for ``all``.

    Raises:
        UsageError: words that name none, all of them; for each the nearest is suggested.
    """
    require_slugs(words)
    if not words or ALL in words:
        return list(all_modes())
    return [mode_called(word) for word in dict.fromkeys(words)]
