"""The cases and modes that were asked for, by their names.

What is called ``named`` imports no case, and so no torch.
"""

import difflib
from collections.abc import Collection, Iterable, Sequence
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
    return _known("case", names, MODES) or tuple(MODES)[:1]


def named_modes(names: Sequence[str], cases: Iterable[str]) -> tuple[str, ...]:
    """These names of modes, each once.

    Raises:
        UsageError: none of *cases* has such a mode.
    """
    return _known("mode", names, modes_of(cases))


def modes_of(cases: Iterable[str]) -> list[str]:
    """Every mode that one of *cases* has."""
    return list(dict.fromkeys(mode for case in cases for mode in MODES[case]))


def chosen_cases(names: Sequence[str]) -> "tuple[Case, ...]":
    """The cases of these names; the first of all where there is none.

    Raises:
        UsageError: there is no such case.
    """
    cases = all_cases()
    return tuple(cases[name] for name in _known("case", names, cases) or tuple(cases)[:1])


def chosen_modes(names: Sequence[str], cases: "Iterable[Case]") -> tuple[str, ...]:
    """These names of modes, each once.

    Raises:
        UsageError: none of *cases* has such a mode.
    """
    return _known("mode", names, list(dict.fromkeys(m for case in cases for m in case.modes)))


def _known(what: str, names: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no {what} {name!r}", hint=hint)
    return tuple(dict.fromkeys(names))
