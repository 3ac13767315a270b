"""What may be concluded from step times of subjects that took turns on a machine that drifts.

**Ratio.** A turn counts as the mean of its middle half, so that spikes do not move it. Turn i of
one and turn i of the other are neighbours in time (A B B A), so drift that both see cancels in the
logarithm of their ratio; what is left of it changes its sign from pair to pair. The ratio is the
mean of the middle half of the pairs. Where slow steps are no spikes but come in most turns, so that
they change the ratio by ``TAIL`` or more, every step of a turn counts.

**Interval.** Moving blocks of an even number of pairs are resampled, longer ones where there are
many pairs, so that drift of the ratio itself counts. The percentiles are widened by Student's t
over the normal quantile, with one degree of freedom for each block, since few pairs know little of
their own noise. A ratio's interval is a 99 % one: the verdict rests on it.

**Verdict** at precision p: *same* where the whole interval lies between 1 / (1 + p) and 1 + p;
*faster* or *slower* where the interval leaves out 1 and the ratio is at least p away from it;
otherwise *unclear*.

**When to stop** is decided by the intervals' widths, of every ratio and of every step time, and at
a few preset numbers of pairs only (``LOOKS``), never by the verdict: stopping as soon as a verdict
is there finds differences where there are none. ``tests/bench/test_bench_simulation.py`` holds the
rates of wrong verdicts.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dflash.measurement import Estimate, Spread, Verdict

Floats = npt.NDArray[np.float64]
Turns = Sequence[Sequence[float]]

MIN_PAIRS = 4
"""Fewer say nothing of their own noise."""

LOOKS = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of pairs after which ``is_enough`` may be asked whether to stop."""

TAIL = 0.05
"""By how much more the slow steps of one must change its mean turn for them to count."""

RATIO_LEVEL = 0.99
LEVEL = 0.95
RESAMPLES = 2000
FARTHEST = 300.0
"""Logarithm of the widest interval: it says nothing, and floats end at 709."""


def compare_turns(
    one: Turns, other: Turns, *, precision: float, seed: int = 0
) -> tuple[Estimate, Verdict]:
    """Compare subjects that took turns with each other, turn i of one beside turn i of the other.

    Args:
        one, other: milliseconds of the steps of every turn; turns that only one has are left out.
        precision: smallest relative difference that counts, 0.01 for 1 %.

    Returns:
        step time of *one* over *other*'s with its 99 % interval, and what follows from it.

    Raises:
        ValueError: fewer than ``MIN_PAIRS`` pairs.
    """
    num_pairs = min(len(one), len(other))
    if num_pairs < MIN_PAIRS:
        raise ValueError(f"{num_pairs} pairs of turns; a comparison takes {MIN_PAIRS} or more")
    pairs = _pair_logs(one[:num_pairs], other[:num_pairs])
    random = np.random.default_rng(seed)
    ratio = _estimate(_middle(pairs), _resampled(pairs, random), level=RATIO_LEVEL, count=num_pairs)
    return ratio, verdict_of(ratio, precision=precision)


def slow_steps_count(one: Turns, other: Turns) -> bool:
    """Whether ``compare_turns`` takes every step into account, and not the typical ones only."""
    num_pairs = min(len(one), len(other))
    typical = turn_logs(one[:num_pairs]) - turn_logs(other[:num_pairs])
    every = _mean_logs(one[:num_pairs]) - _mean_logs(other[:num_pairs])
    return bool(abs(_middle(every) - _middle(typical)) > math.log1p(TAIL))


def compare_apart(one: Turns, other: Turns, *, seed: int = 0) -> Estimate:
    """Step time of *one* over *other*'s, measured in different runs, with its 99 % interval.

    The interval knows what moved within each run; what moved between them it cannot know.

    Raises:
        ValueError: fewer than ``MIN_PAIRS`` turns on a side.
    """
    few = min(len(one), len(other))
    if few < MIN_PAIRS:
        raise ValueError(f"{few} turns; a comparison takes {MIN_PAIRS} or more")
    logs = turn_logs(one), turn_logs(other)
    random = np.random.default_rng(seed)
    resampled = _resampled(logs[0], random) - _resampled(logs[1], random)
    return _estimate(_middle(logs[0]) - _middle(logs[1]), resampled, level=RATIO_LEVEL, count=few)


def verdict_of(ratio: Estimate, *, precision: float) -> Verdict:
    """What a ratio's interval says at a precision; the same of the inverse, turned round."""
    above, below = 1 + precision, 1 / (1 + precision)
    if below <= ratio.low and ratio.high <= above:
        return "same"
    if ratio.high < 1 and ratio.value <= below:
        return "faster"
    if ratio.low > 1 and ratio.value >= above:
        return "slower"
    return "unclear"


def is_enough(ratio: Estimate, *, precision: float) -> bool:
    """Whether the interval is narrow enough for a verdict; ask after ``LOOKS`` pairs only.

    Its half width must be within half the precision; within the whole of it where the ratio is four
    times the precision or more away from 1.
    """
    half = math.log(ratio.high / ratio.low) / 2
    unit = math.log1p(precision)
    return half <= unit / 2 or (half <= unit and abs(math.log(ratio.value)) >= 4 * unit)


def is_repeatable(turns: Turns, *, precision: float) -> bool:
    """Whether one's step is known so well that the same once more would be found the same.

    The half width of its 99 % interval must be within a third of the precision: of two such runs
    ``compare_apart`` has about half the precision, which leaves the rest to what moves between
    them. Ask after ``LOOKS`` turns only.
    """
    if len(turns) < MIN_PAIRS:
        return False
    found = _step(turns, level=RATIO_LEVEL)
    return math.log(found.high / found.low) / 2 <= math.log1p(precision) / 3


def rate(turns_ms: Turns, units: Sequence[float] | float) -> Estimate:
    """Units per second over all timed steps, slow ones too, with a 95 % interval.

    Args:
        turns_ms: milliseconds of the steps of every turn.
        units: what each step was worth, in their order; or one number for all.

    Raises:
        ValueError: fewer than two steps, or not one number of units for every step.
    """
    lengths = [len(turn) for turn in turns_ms]
    total = sum(lengths)
    worth = [float(units)] * total if isinstance(units, int | float) else list(units)
    if total < 2 or len(worth) != total:  # noqa: PLR2004 - one has no spread
        raise ValueError(f"{total} steps and units of {len(worth)}")
    edges = np.cumsum([0, *lengths]) if len(lengths) >= MIN_PAIRS else np.arange(total + 1)
    times = np.array([time_ms for turn in turns_ms for time_ms in turn])
    parts = np.array([edges[:-1], edges[1:]])[:, np.diff(edges) > 0]
    ms, num = (np.add.reduceat(np.array(each), parts[0]) for each in (times, worth))
    picks = _picks(len(ms), np.random.default_rng(0))
    resampled = np.log(num[picks].sum(axis=1) / ms[picks].sum(axis=1))
    value = math.log(num.sum() / ms.sum())
    found = _estimate(value, resampled, level=LEVEL, count=len(ms))
    return Estimate(value=found.value * 1e3, low=found.low * 1e3, high=found.high * 1e3)


def step_interval(turns_ms: Turns, *, median: float) -> Estimate | None:
    """The median step with a 95 % interval; None below ``MIN_PAIRS`` turns.

    The interval is relative to the mean of the middle half, as everywhere else here.
    """
    if len(turns_ms) < MIN_PAIRS:
        return None
    found = _step(turns_ms, level=LEVEL)
    scale = median / found.value
    return Estimate(value=median, low=found.low * scale, high=found.high * scale)


def _step(turns: Turns, *, level: float) -> Estimate:
    logs = turn_logs(turns)
    resampled = _resampled(logs, np.random.default_rng(0))
    return _estimate(_middle(logs), resampled, level=level, count=len(logs))


def spread(times_ms: Sequence[float]) -> Spread:
    """Median, deciles and maximum of one or more steps."""
    low, median, high = (float(part) for part in np.quantile(times_ms, (0.1, 0.5, 0.9)))
    return Spread(median=median, p10=low, p90=high, max=max(times_ms), count=len(times_ms))


def fit_exponent(values: Sequence[float], times: Sequence[float]) -> Estimate:
    """Fit ``times ~ values ** exponent`` by least squares of logarithms.

    The 95 % interval is of resampled residuals: a curve that is no power law has a wide one.

    Raises:
        ValueError: fewer than three different values.
    """
    if len(set(values)) < 3 or len(values) != len(times):  # noqa: PLR2004 - two fit any line
        raise ValueError(f"an exponent takes three or more different values, not {list(values)}")
    x, y = np.log(values), np.log(times)
    x -= x.mean()
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    random = np.random.default_rng(0)
    drawn = random.choice(residuals, (RESAMPLES, len(x)))
    slopes = slope + drawn @ x / (x @ x)
    freedom = len(x) - 2
    widening = _widening(LEVEL, freedom) * math.sqrt(len(x) / freedom)
    low, high = _interval(slope, slopes, level=LEVEL, widening=widening)
    return Estimate(value=slope, low=low, high=high)


def turn_logs(turns_ms: Turns) -> Floats:
    """Logarithm of the mean of the middle half of every turn."""
    return np.log(_of_each(turns_ms, _middle))


def _mean_logs(turns_ms: Turns) -> Floats:
    return np.log(_of_each(turns_ms, _mean))


def _of_each(turns_ms: Turns, figure: Callable[[Floats], Floats]) -> Floats:
    """A figure of every turn; in one go where all are of one length, as almost always."""
    if len({len(turn) for turn in turns_ms}) == 1:
        return figure(np.array(turns_ms, float))
    return np.array([figure(np.array(turn, float)) for turn in turns_ms])


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1))


def _pair_logs(one: Turns, other: Turns) -> Floats:
    logs = _mean_logs if slow_steps_count(one, other) else turn_logs
    return logs(one) - logs(other)


def _middle(values: Floats) -> Floats:
    """Mean of the middle half along the last axis."""
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1))


def _resampled(values: Floats, random: np.random.Generator) -> Floats:
    return _middle(values[_picks(len(values), random)])


def _picks(count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices of ``RESAMPLES`` samples, of blocks of neighbours; the last is the first's."""
    block = _block(count)
    starts = random.integers(0, count, (RESAMPLES, -(-count // block)))
    blocks = (starts[:, :, None] + np.arange(block)) % count
    return np.asarray(blocks.reshape(RESAMPLES, -1)[:, :count])


def _block(count: int) -> int:
    """Pairs in a block; even, so that what changes its sign from pair to pair cancels. One where
    so few are there that blocks of two would all be the same."""
    if count < MIN_PAIRS:
        return 1
    return 2 if count < 24 else 4 if count < 48 else 6  # noqa: PLR2004 - about the cube root


def _estimate(value: float | Floats, resampled: Floats, *, level: float, count: int) -> Estimate:
    """Of logarithms of *count* resampled things."""
    block = _block(count)
    freedom = count // block if count >= 6 else 1  # noqa: PLR2004 - held by the simulation
    widening = _widening(level, freedom) * math.sqrt(count / max(count - block, 1))
    low, high = _interval(float(value), resampled, level=level, widening=widening)
    return Estimate(value=exp(float(value)), low=exp(low), high=exp(high))


def exp(logarithm: float) -> float:
    """The number of a *logarithm*, where that is one that can be divided by."""
    return math.exp(max(-FARTHEST, min(FARTHEST, logarithm)))


def _interval(
    value: float, resampled: Floats, *, level: float, widening: float
) -> tuple[float, float]:
    low, high = np.quantile(resampled, ((1 - level) / 2, (1 + level) / 2))
    low = value - widening * max(value - float(low), 0.0)
    return low, value + widening * max(float(high) - value, 0.0)


FIRST_T = {0.95: (12.706, 4.303, 3.182), 0.99: (63.657, 9.925, 5.841)}
"""Student's t for 1, 2 and 3 degrees of freedom."""


def _widening(level: float, freedom: int) -> float:
    """Student's t over the normal quantile."""
    normal = NormalDist().inv_cdf((1 + level) / 2)
    if freedom <= len(FIRST_T[level]):
        return FIRST_T[level][freedom - 1] / normal
    square = normal * normal  # Cornish-Fisher, within 1.3 % from 4 degrees on
    terms = (
        (square + 1) / 4,
        (5 * square**2 + 16 * square + 3) / 96,
        (3 * square**3 + 19 * square**2 + 17 * square - 15) / 384,
    )
    return 1.0 + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
