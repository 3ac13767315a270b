"""What ``--expect`` and ``--fail-if`` are written in, and where a text is wrong.

::

    expectation = subject comparison number
    rule        = [mode "."] figure comparison sign number
    subject     = mode "/" mode         how many times as fast the first is as the second
                | [mode "."] figure     of one mode, or of every mode that has it
    comparison  = ">=" | ">" | "<=" | "<" | "=="
    number      = digits ["%"]          3, 0.95, 1e-3, 3%

A rule's number is a change: ``+3%`` of what it was before, or ``+0.5`` in the figure's own unit.
"""

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dflash.errors import UsageError
from dflash_bench.figures import FIGURES

Compares = Callable[[float, float], bool]
COMPARISONS: dict[str, Compares] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
OVER_BASELINE = "over_baseline"
"""What only a rule can speak of: step time over the baseline's in the same run, which leaves out
what the machine does from run to run."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_COMPARISON = re.compile(r">=|<=|==|>|<")
_NUMBER = re.compile(r"([+-]?)(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\s*(%?)", re.ASCII)
_DOT, _SLASH = re.compile(r"\."), re.compile(r"/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A demand on one bench. Either *over*, and then the two modes' speeds; or *figure*."""

    text: str
    mode: str | None
    over: str | None
    figure: str | None
    comparison: str
    number: float

    def holds(self, value: float) -> bool:
        """Whether *value* is what is demanded."""
        return COMPARISONS[self.comparison](value, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What makes a change of *figure* between two benches a regression.

    Attributes:
        limit: change that counts as too much: a share of what it was where *relative*.
    """

    text: str
    mode: str | None
    figure: str
    comparison: str
    limit: float
    relative: bool

    def breaks(self, change: float) -> bool:
        """Whether a change is too much."""
        return COMPARISONS[self.comparison](change, self.limit)


def parse_expectation(
    text: str, groups: Sequence[Collection[str]], *, others: Collection[str] = ()
) -> Expectation:
    """Read an expectation about modes.

    Args:
        text: as it was given.
        groups: of modes that are measured beside each other, one for each case.
        others: modes that there are besides, and that are not measured.

    Raises:
        UsageError: it is none, or cannot be judged whatever is measured; names the character.
    """
    modes = list(dict.fromkeys(mode for group in groups for mode in group))
    scan = _Scanner("--expect", text, unmeasured=[one for one in others if one not in modes])
    first, at = scan.take(_NAME, "a mode or a figure")
    mode: str | None = None
    over: str | None = None
    figure: str | None = None
    if scan.skip(_SLASH):
        mode = scan.known(first, at, modes, what="mode")
        other, at = scan.take(_NAME, "a mode")
        over = scan.known(other, at, modes, what="mode")
        if not any(mode in group and over in group for group in groups):
            scan.fail(at, f"no case here has both {mode} and {over}", hint=_of_groups(groups))
    else:
        mode, figure = scan.figure(first, at, modes)
    comparison, _ = scan.take(_COMPARISON, "one of " + " ".join(COMPARISONS))
    _, number, percent = scan.number()
    scan.end()
    return Expectation(
        text=text,
        mode=mode,
        over=over,
        figure=figure,
        comparison=comparison,
        number=number / 100 if percent else number,
    )


def parse_rule(text: str, modes: Collection[str]) -> Rule:
    """Read a rule about *modes*.

    Raises:
        UsageError: it is none; names the character.
    """
    scan = _Scanner("--fail-if", text)
    first, at = scan.take(_NAME, "a figure")
    mode, figure = scan.figure(first, at, modes)
    comparison, at = scan.take(_COMPARISON, "> or <")
    if comparison == "==":
        scan.fail(at, "a change is compared by > or <", hint="such as step_ms > +3%")
    at = scan.at
    sign, number, percent = scan.number()
    if not sign:
        scan.fail(at, "a change has a sign", hint=f"write +{number:g}{percent}")
    scan.end()
    return Rule(
        text=text,
        mode=mode,
        figure=figure,
        comparison=comparison,
        limit=number / 100 if percent else number,
        relative=bool(percent),
    )


def _of_groups(groups: Sequence[Collection[str]]) -> str:
    return f"measured together: {'; '.join(', '.join(group) for group in groups)}"


class _Scanner:
    """Takes one word after another off a text, and knows where it is."""

    def __init__(self, option: str, text: str, *, unmeasured: Collection[str] = ()) -> None:
        self._option = option
        self._unmeasured = unmeasured
        self._text = text
        self._figures = [*FIGURES, *((OVER_BASELINE,) if option == "--fail-if" else ())]
        self.at = 0
        self._blank()

    def take(self, pattern: re.Pattern[str], wanted: str) -> tuple[str, int]:
        """The next word, and where it starts."""
        found = pattern.match(self._text, self.at)
        if found is None:
            self.fail(self.at, f"{wanted} is missing")
        at, self.at = self.at, found.end()
        self._blank()
        return found.group(), at

    def skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self.at)
        if found is not None:
            self.at = found.end()
            self._blank()
        return found is not None

    def figure(self, first: str, at: int, modes: Collection[str]) -> tuple[str | None, str]:
        """The mode, if *first* is one with a dot behind it, and the figure."""
        if not self.skip(_DOT):
            if first in self._figures:
                return None, first
            if first in modes or first in self._unmeasured:
                first = self.known(first, at, modes, what="mode")
                hint = f"{first}/OTHER compares speeds, {first}.step_ms is a figure of one mode"
                self.fail(self.at, f"nothing is said about mode {first!r}", hint=hint)
            return None, self.known(first, at, self._figures, what="figure")
        mode = self.known(first, at, modes, what="mode")
        name, at = self.take(_NAME, "a figure")
        return mode, self.known(name, at, self._figures, what="figure")

    def number(self) -> tuple[str, float, str]:
        """Sign, value with its sign, and "%" or ""."""
        found = _NUMBER.match(self._text, self.at)
        if found is None:
            self.fail(self.at, "a number is missing")
        sign, digits, percent = found.groups()
        if not math.isfinite(float(digits)):
            self.fail(self.at, f"{digits} is no limit: it is above all numbers")
        self.at = found.end()
        self._blank()
        return sign, float(sign + digits), percent

    def known(self, name: str, at: int, names: Collection[str], *, what: str) -> str:
        if what == "mode" and name in self._unmeasured:
            why = f"mode {name!r} is not among those that this call measures"
            self.fail(at, why, hint=f"add --mode {name}, or expect nothing of it")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{what}s: {', '.join(names)}"
            self.fail(at, f"there is no {what} {name!r}", hint=hint)
        return name

    def end(self) -> None:
        if self.at < len(self._text):
            self.fail(self.at, f"{self._text[self.at :]!r} is too much")

    def fail(self, at: int, why: str, *, hint: str = "") -> NoReturn:
        what = f"{self._option} {self._text!r}, at character {at + 1}: {why}"
        raise UsageError(what, hint=hint or "such as graphed/eager >= 3, or step_ms > +3%")

    def _blank(self) -> None:
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
