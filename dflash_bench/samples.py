"""Readings of GPUs, and what of them makes a run less believable. Not here: how they are read."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash.measurement import Spoiled

GIB = 2**30
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAP = 0x04
"""No slowdown: a GPU at full work runs at the clocks that its power limit allows."""

What = Literal["throttled", "clocks", "other processes", "temperature"]
FEW = 0.01
"""Share of the samples from which a slowdown is told."""

CLOCKS_MOVE = 0.05
NEAR_SLOWDOWN_C = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of one GPU; None what its driver does not tell.

    ``processes`` are bytes by process number, as NVML counts them.
    """

    device: str
    sm_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int | None
    processes: dict[int, int] = field(default_factory=dict)


def judge(
    samples: Sequence[Sample], *, own: Collection[int], slowdown_c: Mapping[str, float]
) -> list[Spoiled]:
    """What of the samples makes figures less believable; *slowdown_c* is by device."""
    devices = list(dict.fromkeys(sample.device for sample in samples))
    found = []
    for device in devices:
        of_it = [sample for sample in samples if sample.device == device]
        told = [*_throttled(of_it), *_clocks(of_it), *_hot(of_it, slowdown_c.get(device))]
        found += told if len(devices) == 1 else [_named(device, one) for one in told]
    return [*found, *_others(samples, own)]


def share_with(reason: int, samples: Sequence[Sample]) -> float | None:
    """Share of *samples* in which this lowered clocks; None where none of them tells."""
    told = [sample.reasons for sample in samples if sample.reasons is not None]
    return sum(bool(reasons & reason) for reasons in told) / len(told) if told else None


def known(readings: Iterable[float | None]) -> list[float]:
    """Those that a driver has told."""
    return [reading for reading in readings if reading is not None]


def _spoiled(what: What, text: str, share: float) -> Spoiled:
    return Spoiled(what=what, text=f"{text}, in {share:.0%} of the samples", share=share)


def _named(device: str, one: Spoiled) -> Spoiled:
    return Spoiled(what=one.what, text=f"{device}: {one.text}", share=one.share)


def _throttled(samples: Sequence[Sample]) -> Iterator[Spoiled]:
    for bits, name in SLOWDOWNS.items():
        share = share_with(bits, samples)
        if share is not None and share >= FEW:
            yield _spoiled("throttled", name, share)


def _clocks(samples: Sequence[Sample]) -> Iterator[Spoiled]:
    clocks = sorted(known(sample.sm_mhz for sample in samples))
    if not clocks:
        return
    low, median, high = (clocks[int(part * (len(clocks) - 1))] for part in (0.1, 0.5, 0.9))
    if median and (high - low) / median > CLOCKS_MOVE:
        outside = [mhz for mhz in clocks if abs(mhz - median) > CLOCKS_MOVE / 2 * median]
        text = (
            f"10th to 90th percentile {low:,.0f} to {high:,.0f} MHz; more than"
            f" {CLOCKS_MOVE / 2:.1%} off the median"
        )
        yield _spoiled("clocks", text, len(outside) / len(clocks))


def _hot(samples: Sequence[Sample], slowdown_c: float | None) -> Iterator[Spoiled]:
    degrees = known(sample.temperature_c for sample in samples)
    if slowdown_c is None:
        return
    near = [each for each in degrees if each > slowdown_c - NEAR_SLOWDOWN_C]
    if near:
        text = f"up to {max(near):.0f} degrees C, and a GPU slows down at {slowdown_c:.0f}"
        yield _spoiled("temperature", text, len(near) / len(degrees))


def _others(samples: Sequence[Sample], own: Collection[int]) -> Iterator[Spoiled]:
    """Processes that are not ours; where NVML counts in another way than we do, nothing is said."""
    if not any(number in own for sample in samples for number in sample.processes):
        return
    seen = [
        {number: used for number, used in sample.processes.items() if number not in own}
        for sample in samples
    ]
    strangers = {number for each in seen for number in each}
    if strangers:
        most = max(sum(each.values()) for each in seen) / GIB
        text = f"{len(strangers)} on the same GPUs, with up to {most:.1f} GiB"
        yield _spoiled("other processes", text, sum(bool(each) for each in seen) / len(seen))
