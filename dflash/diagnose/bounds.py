"""Exact bounds on the rate of something that was seen in some of several launches."""

from math import comb, exp, lgamma, log, log1p

from dflash.diagnose.findings import Rate

CONFIDENCE = 0.95
HALVINGS = 60  # leaves an error below 1e-17
ENOUGH = 1e-17  # of a sum, below which a falling term changes nothing


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
    low, high = 0.0, shown / launches  # at which half of all cases would show as many
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = _at_least_so_many(shown, launches, middle) < 1.0 - CONFIDENCE
        low, high = (middle, high) if enough else (low, middle)
    return low


def _at_least_so_many(shown: int, launches: int, chance: float) -> float:
    """The binomial tail from *shown* on, for a *chance* below shown / launches: it only falls."""
    ways = lgamma(launches + 1) - lgamma(shown + 1) - lgamma(launches - shown + 1)
    term = exp(ways + shown * log(chance) + (launches - shown) * log1p(-chance))
    total = term
    for k in range(shown, launches):
        term *= (launches - k) / (k + 1) * chance / (1.0 - chance)
        total += term
        if term < total * ENOUGH:
            break
    return total
