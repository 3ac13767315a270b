"""Figures as words: how many digits, and how an interval is told."""

import math

from dflash.measurement import Estimate

UNITS = {"token": "tok"}
MILLION = 1_000_000
TEN = 10.0
MOST_DECIMALS = 4
WIDE = 0.05


def rate_unit(unit: str) -> str:
    """``tok/s`` of tokens."""
    return f"{UNITS.get(unit, unit)}/s"


def number(value: float | None, *, digits: int = 4) -> str:
    """So many digits, or all before the point; ``1.23M`` from a million on, ``3e-05`` when tiny."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    if not value:
        return "0"
    if isinstance(value, int) and abs(value) < MILLION:
        return f"{value:,}"
    if abs(value) >= MILLION:
        return f"{value / MILLION:,.2f}M"
    size = math.floor(math.log10(abs(value)))
    told = f"{value:,.{min(max(0, digits - 1 - size), MOST_DECIMALS)}f}"
    return told if told.strip("-0.") else f"{value:.0e}"


def estimate_text(estimate: Estimate | None, *, digits: int = 4) -> str:
    """``22,981 ±0.3%``: the wider side of its interval, as a share of the figure.

    A wide one is told by both sides, which may differ: ``0.815 -12%+30%``.
    """
    if estimate is None:
        return ""
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    wider = max(below, above)
    if not estimate.value or not wider:
        return number(estimate.value, digits=digits)
    told = f"±{wider / estimate.value:.1%}"
    if wider >= WIDE * estimate.value:
        told = f"-{below / estimate.value:.0%}+{above / estimate.value:.0%}"
    return f"{number(estimate.value, digits=digits)} {told}"


def rough(value: float | None) -> str:
    """Of seconds and GiB: one digit after the point, more below ten; counts as they are."""
    if value is None or isinstance(value, int) or abs(value) < TEN:
        return number(value, digits=3)
    return f"{value:,.1f}"


def share(value: float | None) -> str:
    """``12.3%``."""
    return "" if value is None else f"{value:.1%}"
