"""Exact bounds on the rate of something that was seen in some of several launches."""

from math import comb

from dflash.diagnose.findings import Rate

CONFIDENCE = 0.95
HALVINGS = 60  # leaves an error below 1e-17


def rate(shown: int, launches: int) -> Rate:
    """Return the Clopper-Pearson bounds, each one-sided: 0 of 20 is at most 13.9 %."""
    if not 0 <= shown <= launches:
        raise ValueError(f"{shown} of {launches} launches")
    return Rate(
        shown=shown,
        launches=launches,
        at_least=_lower(shown, launches),
        at_most=1.0 - _lower(launches - shown, launches),
    )


def chance_that_alike(faulty: Rate, sound: Rate) -> float:
    """Fisher's exact one-sided test: how likely so few of *sound* are at one rate for both."""
    total, shown = faulty.launches + sound.launches, faulty.shown + sound.shown
    ways = sum(
        comb(sound.launches, k) * comb(faulty.launches, shown - k) for k in range(sound.shown + 1)
    )
    return ways / comb(total, shown)


def _lower(shown: int, launches: int) -> float:
    """The rate at which *shown* or more would be seen in one case of twenty."""
    if shown == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        at_least_so_many = sum(
            comb(launches, k) * middle**k * (1.0 - middle) ** (launches - k)
            for k in range(shown, launches + 1)
        )
        low, high = (middle, high) if at_least_so_many < 1.0 - CONFIDENCE else (low, middle)
    return low
