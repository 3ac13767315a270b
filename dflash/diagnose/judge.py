"""From launches to a verdict. Pure: what happened goes in, what it means comes out."""

from collections.abc import Sequence
from typing import NamedTuple

from dflash.diagnose.bounds import chance_that_alike, rate
from dflash.diagnose.expected import Expectation
from dflash.diagnose.findings import Launch, Rate, Severity, Variant, Verdict, Verified
from dflash.failures import FailureMode

MAX_CHANCE = 0.05  # of a remedy that seems to help by luck


class Judgement(NamedTuple):
    """The verdict of one mode, and what it rests on."""

    verdict: Verdict
    why: str
    faulty: Rate | None
    sound: Rate | None
    control: Rate | None
    remedy_verified: Verified
    remedy_why: str


def shows(mode: FailureMode, launch: Launch) -> bool:
    """Whether *launch* is the failure: a number above the limit, or one of the mode's deaths."""
    if launch.end == "number":
        return launch.value is not None and launch.value > mode.limit
    return launch.end in mode.deaths


def is_quiet(mode: FailureMode, launch: Launch) -> bool:
    """Whether *launch* came to its end with a number that is within the limit."""
    return launch.end == "number" and launch.value is not None and launch.value <= mode.limit


def judge(mode: FailureMode, launches: Sequence[Launch]) -> Judgement:
    """Weigh every launch of one mode."""
    faulty, sound, control = (
        _rate(mode, launches, variant) for variant in ("faulty", "sound", "control")
    )
    verdict, why = _verdict(mode, launches, faulty=faulty, control=control)
    verified, remedy_why = _remedy(mode, launches, verdict=verdict, rates=(faulty, sound))
    return Judgement(verdict, why, faulty, sound, control, verified, remedy_why)


def severity(judgement: Judgement, expectation: Expectation) -> Severity:
    """An error: the failure is here, or its remedy failed. A warning: something is not as known."""
    if judgement.verdict == "reproduced" or judgement.remedy_verified == "no":
        return "error"
    if judgement.verdict == "not applicable":
        return "none"
    as_expected = judgement.verdict == expectation.expected
    return "none" if as_expected else "warning"


def _rate(mode: FailureMode, launches: Sequence[Launch], variant: Variant) -> Rate | None:
    """Launches that say something: those that were killed from outside or broke do not."""
    mine = [launch for launch in launches if launch.variant == variant]
    shown = sum(shows(mode, launch) for launch in mine)
    quiet = sum(is_quiet(mode, launch) for launch in mine)
    return rate(shown, shown + quiet) if mine else None


def _verdict(
    mode: FailureMode, launches: Sequence[Launch], *, faulty: Rate | None, control: Rate | None
) -> tuple[Verdict, str]:
    if faulty is None:
        return "inconclusive", "nothing was launched"
    if faulty.shown:
        return "reproduced", _times(faulty)
    stray = _stray(mode, launches, "faulty")
    if stray is not None:
        return "inconclusive", f"a launch ended otherwise: {_end_of(stray)}"
    if control is not None and not control.shown:
        stray = _stray(mode, launches, "control")
        how = "" if stray is None else f": {_end_of(stray)}"
        return "inconclusive", f"the positive control did not fire{how}"
    if not mode.chance:
        return "not reproduced", "0 of 1, and one launch decides"
    return "not reproduced", f"{_times(faulty)}, so at most {faulty.at_most:.1%}"


def _remedy(
    mode: FailureMode,
    launches: Sequence[Launch],
    *,
    verdict: Verdict,
    rates: tuple[Rate | None, Rate | None],
) -> tuple[Verified, str]:
    faulty, sound = rates
    if sound is None:
        return "not run", "nothing to remedy here"
    if sound.shown:
        return "no", f"the remedied program failed too, {_times(sound)}"
    stray = _stray(mode, launches, "sound")
    if stray is not None:
        broken = stray.end in ("not started", "killed")
        return ("not run" if broken else "no"), f"the remedied program: {_end_of(stray)}"
    if verdict != "reproduced" or faulty is None:
        return "not run", f"it ran clean, {_times(sound)}, but so did the faulty program"
    if mode.chance and chance_that_alike(faulty, sound) > MAX_CHANCE:
        return "unclear", f"{_times(sound)} against {_times(faulty)} may be luck: more launches"
    return "yes", f"{_times(sound)} with it, {_times(faulty)} without"


def _stray(mode: FailureMode, launches: Sequence[Launch], variant: Variant) -> Launch | None:
    """The first launch of *variant* that says nothing about the failure."""
    mine = (launch for launch in launches if launch.variant == variant)
    return next((one for one in mine if not shows(mode, one) and not is_quiet(mode, one)), None)


def _end_of(launch: Launch) -> str:
    if launch.end == "number":
        return f"its number is {launch.value}"
    return f"{launch.end}: {launch.message.splitlines()[0] if launch.message else 'no message'}"


def _times(seen: Rate) -> str:
    return f"{seen.shown} of {seen.launches}"
