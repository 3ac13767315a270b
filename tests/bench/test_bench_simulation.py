"""How often a verdict is wrong on a machine that drifts, throttles and is shared: by simulation."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from dflash.measurement import Verdict
from dflash_bench.statistics import (
    LOOKS,
    compare_apart,
    compare_turns,
    is_enough,
    is_repeatable,
    verdict_of,
)

PRECISION = 0.01
STEPS = 10
RUNS = 300


@dataclass(frozen=True)
class Machine:
    """What moves step times, in logarithms.

    Attributes:
        walk: random walk, a turn; both subjects see it.
        trend: warming up, a turn.
        throttle: how much slower while throttled; throttling starts or ends in 2 % of turns.
        turn: offset that all steps of one turn share.
        step: noise of a step, correlated 0.6 with the step before it.
        spikes: share of steps that are hit by something heavy-tailed.
        own: drift of one subject against the other, correlated 0.7 from pair to pair.
        modes: subjects in a round; the two that are compared are its first and its last.
    """

    walk: float = 0.002
    trend: float = 0.0
    throttle: float = 0.03
    turn: float = 0.002
    step: float = 0.005
    spikes: float = 0.02
    own: float = 0.0
    modes: int = 2


MACHINES = {
    "drifting and throttled": Machine(),
    "warming up, five modes": Machine(trend=0.0005, walk=0.001, modes=5),
    "heavily shared": Machine(walk=0.004, throttle=0.08, turn=0.004, spikes=0.05),
    "one mode drifts by itself": Machine(own=0.0015),
}


def correlated(random: np.random.Generator, shape: tuple[int, ...], rho: float) -> np.ndarray:
    """Standard normal values, each correlated *rho* with the one before it on the last axis."""
    values = random.normal(size=shape)
    for i in range(1, shape[-1]):
        values[..., i] = rho * values[..., i - 1] + (1 - rho**2) ** 0.5 * values[..., i]
    return values


def measured(
    machine: Machine, random: np.random.Generator, *, pairs: int, effect: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Milliseconds of every step of the last and of the first subject of each round."""
    turns = pairs * machine.modes
    drift = np.cumsum(random.normal(machine.trend, machine.walk, turns))
    throttled = np.cumsum(random.random(turns) < 0.02) % 2 * machine.throttle
    offset = random.normal(0, machine.turn, turns)
    noise = machine.step * correlated(random, (turns, STEPS), 0.6)
    hit = random.random((turns, STEPS)) < machine.spikes
    spikes = hit * np.log1p(0.2 * random.pareto(1.5, (turns, STEPS)))
    own = machine.own * correlated(random, (pairs,), 0.7)
    times = np.exp((drift + throttled + offset)[:, None] + noise + spikes) * 100
    rounds = times.reshape(pairs, machine.modes, STEPS)
    rounds[1::2] = rounds[1::2, ::-1]  # A B B A
    one = rounds[:, -1] * (1 + effect) * np.exp(own)[:, None]
    return one.tolist(), rounds[:, 0].tolist()


def verdict(machine: Machine, *, effect: float, seed: int, most: int = 128) -> Verdict:
    """Of one whole session: pairs until the precision, at most *most*."""
    one, other = measured(machine, np.random.default_rng(seed), pairs=most, effect=effect)
    found: Verdict = "unclear"
    for look in [look for look in (4, *LOOKS) if look <= most]:
        ratio, found = compare_turns(one[:look], other[:look], precision=PRECISION, seed=seed)
        if is_enough(ratio, precision=PRECISION):
            break
    return found


def verdicts(
    machine: Machine, *, effect: float, first_seed: int, most: int = 128
) -> Counter[Verdict]:
    seeds = range(first_seed, first_seed + RUNS)
    return Counter(verdict(machine, effect=effect, seed=seed, most=most) for seed in seeds)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_difference_that_is_not_there_is_hardly_ever_found(machine: Machine) -> None:
    found = verdicts(machine, effect=0.0, first_seed=0)
    assert found["faster"] + found["slower"] < 0.02 * RUNS
    assert found["same"] >= 0.95 * RUNS


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_true_two_percent_is_found(machine: Machine) -> None:
    found = verdicts(machine, effect=0.02, first_seed=10**6)
    assert found["slower"] >= 0.95 * RUNS
    assert found["faster"] == found["same"] == 0


@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_time_that_runs_out_early_makes_it_unclear_not_wrong(machine: Machine, most: int) -> None:
    none = verdicts(machine, effect=0.0, first_seed=2 * 10**6, most=most)
    assert none["faster"] + none["slower"] < 0.02 * RUNS
    two_percent = verdicts(machine, effect=0.02, first_seed=3 * 10**6, most=most)
    assert two_percent["faster"] + two_percent["same"] < 0.02 * RUNS


@pytest.mark.parametrize("alternating", [0.0, 0.012], ids=["calm", "hotter every other turn"])
def test_the_same_once_more_is_found_the_same(alternating: float) -> None:
    """On a machine that stays as it is, but for noise and for what the neighbour leaves behind."""
    still = Machine(walk=0.0, throttle=0.0)
    found: Counter[Verdict] = Counter()
    for seed in range(RUNS):
        runs = []
        for n in range(2):
            random = np.random.default_rng(4 * 10**6 + 2 * seed + n)
            _, all_turns = measured(still, random, pairs=128, effect=0.0)
            turns = [
                [time * (1 + alternating * (i % 2)) for time in turn]
                for i, turn in enumerate(all_turns)
            ]
            looks = (look for look in LOOKS if is_repeatable(turns[:look], precision=PRECISION))
            runs.append(turns[: next(looks)])
        found[verdict_of(compare_apart(*runs), precision=PRECISION)] += 1
    assert found["same"] >= 0.95 * RUNS
    assert found["faster"] + found["slower"] == 0


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        one, other = measured(MACHINES["heavily shared"], random, pairs=24, effect=0.1)
        ratio, _ = compare_turns(one, other, precision=PRECISION)
        held += ratio.low <= 1.1 <= ratio.high
    assert held >= 0.975 * RUNS


def test_the_same_machines_fool_who_measures_one_after_the_other() -> None:
    """A control of the simulation: all steps of one, then all of the other, and a t interval."""
    fooled = 0
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        _, turns = measured(Machine(), random, pairs=48, effect=0.0)
        one, other = np.log(turns[:24]).ravel(), np.log(turns[24:]).ravel()
        error = ((one.var(ddof=1) + other.var(ddof=1)) / one.size) ** 0.5
        fooled += abs(one.mean() - other.mean()) > 2.6 * error
    assert fooled >= 0.5 * RUNS
