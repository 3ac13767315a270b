"""The cases and modes that were asked for, by their names.

What is called ``named`` imports no case, and so no torch.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dflash.errors import UsageError
from dflash_bench.cases import MODES, all_cases

if TYPE_CHECKING:
    from dflash_bench.cases._case import Case


def named_cases(names: Sequence[str]) -> tuple[str, ...]:
    """These names of cases, each once; the first of all where there is none.

    Raises:
        UsageError: there is no such case.
    """
    for name in names:
        if name not in MODES:
            raise _unknown("case", name, MODES)
    return tuple(dict.fromkeys(names or list(MODES)[:1]))


def named_modes(names: Sequence[str], cases: Iterable[str]) -> tuple[str, ...]:
    """These names of modes, each once.

    Raises:
        UsageError: none of *cases* has such a mode.
    """
    known = modes_of(cases)
    for name in names:
        if name not in known:
            raise _unknown("mode", name, known)
    return tuple(dict.fromkeys(names))


def modes_of(cases: Iterable[str]) -> list[str]:
    """Every mode that one of *cases* has."""
    return list(dict.fromkeys(mode for case in cases for mode in MODES[case]))


def chosen_cases(names: Sequence[str]) -> "tuple[Case, ...]":
    """The cases of these names, as ``named_cases``.

    Raises:
        UsageError: there is no such case.
    """
    return tuple(all_cases()[name] for name in named_cases(names))


def _unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return UsageError(f"there is no {what} {name!r}", hint=hint)
