"""Which processes may be alive together: the baseline and as many modes as fit beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash.train.fit import CERTAIN_SHARE

CONTEXT_GIB = 1.5
"""What a process takes of a GPU besides torch's tensors: context, kernels, workspaces."""

GAPS_GIB = 3.0
"""What the allocator may reserve beyond a plan: 25.1 GiB of 22.5 planned were seen."""

UNKNOWN_SHARE = 0.25
"""Of the room, that a mode without a plan is taken to need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What a process takes of a device beyond its plan.

    Attributes:
        context_gib: before it has a tensor.
        gaps_gib, gaps_share: between tensors, in any case and as a share of the plan.
        unknown_share: of the room, where there is no plan.
    """

    context_gib: float
    gaps_gib: float
    gaps_share: float = 0.0
    unknown_share: float = 0.0

    def takes_gib(self, need_gib: float | None, room_gib: float) -> float:
        """What a mode of this plan may take of *room_gib* in all."""
        if need_gib is None:
            return self.unknown_share * room_gib + self.context_gib
        return need_gib * (1 + self.gaps_share) + self.gaps_gib + self.context_gib


ON_GPU = Beyond(context_gib=CONTEXT_GIB, gaps_gib=GAPS_GIB, unknown_share=UNKNOWN_SHARE)
ON_CPU = Beyond(context_gib=0.0, gaps_gib=0.5, gaps_share=0.35)
"""Peaks of 4.8 and 7.9 GiB of 3.3 and 6.1 planned were seen (drafter-step, eager, smollm2 at
T = 1024 and 2048), 0.3 of them before the first tensor. A mode without a plan takes part there."""


@dataclass(slots=True)
class Grouping:
    """How the modes of a case are measured.

    Attributes:
        baseline: stays alive while all *together* are measured, "" where none can.
        together: groups that take turns with the baseline, one group after another.
        alone: modes that do not fit beside it, each measured by itself.
        too_large: modes that do not fit at all.
    """

    baseline: str = ""
    together: list[list[str]] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)


def group_modes(
    needs_gib: Mapping[str, float | None], room_gib: float | None, *, beyond: Beyond = ON_GPU
) -> Grouping:
    """Group modes by what they need, in their order; no room to count means room for all.

    The baseline is the first mode that any other fits beside.
    """
    if room_gib is None:
        first, *others = needs_gib
        return Grouping(baseline=first, together=[others])
    found = Grouping()
    room = room_gib
    takes = {name: beyond.takes_gib(need, room) for name, need in needs_gib.items()}
    found.too_large = [
        name
        for name, need in needs_gib.items()
        if need is not None and CERTAIN_SHARE * need + beyond.context_gib > room
    ]
    fitting = [name for name in needs_gib if name not in found.too_large]
    smallest = sorted(fitting, key=takes.__getitem__)
    for name in fitting:
        others = [other for other in smallest if other != name]
        if others and takes[name] + takes[others[0]] <= room:
            found.baseline = name
            break
    if not found.baseline:
        found.alone = fitting
        return found
    left = room - takes[found.baseline]
    for name in fitting:
        if name == found.baseline:
            continue
        if takes[name] > left:
            found.alone.append(name)
            continue
        last = found.together[-1] if found.together else None
        if last is not None and sum(takes[other] for other in last) + takes[name] <= left:
            last.append(name)
        else:
            found.together.append([name])
    return found
