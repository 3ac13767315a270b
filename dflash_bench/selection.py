"""The cases and modes that were asked for, by their names."""

import difflib
from collections.abc import Iterable, Sequence

from dflash.errors import UsageError
from dflash_bench.cases import all_cases
from dflash_bench.cases._case import Case


def chosen_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of these names, each once; the first of all where there is no name.

    Raises:
        UsageError: there is no such case.
    """
    cases = all_cases()
    for name in names:
        if name not in cases:
            raise _unknown("case", name, cases)
    return tuple(cases[name] for name in dict.fromkeys(names or list(cases)[:1]))


def chosen_modes(names: Sequence[str], cases: Iterable[Case]) -> tuple[str, ...]:
    """The modes of these names, each once.

    Raises:
        UsageError: none of *cases* has such a mode.
    """
    known = known_modes(cases)
    for name in names:
        if name not in known:
            raise _unknown("mode", name, known)
    return tuple(dict.fromkeys(names))


def known_modes(cases: Iterable[Case]) -> list[str]:
    """Every mode that one of *cases* has."""
    return list(dict.fromkeys(mode for case in cases for mode in case.modes))


def _unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return UsageError(f"there is no {what} {name!r}", hint=hint)
