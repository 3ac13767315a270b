"""Who waits for whom, and what to do about it."""

from collections.abc import Collection
from dataclasses import dataclass

BALANCED_SHARE = 0.05
"""Below this share of the steps' time a wait is not worth rearranging devices for."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of waiting, each averaged over the workers of its side, in *elapsed_s* of steps.

    What is no step (an evaluation, a checkpoint) is in none of them.
    """

    elapsed_s: float
    target_for_slot_s: float
    drafter_for_features_s: float
    target_for_data_s: float

    def suggestion(self, targets: Collection[str], drafters: Collection[str]) -> str:
        """One line on how to rebalance between the devices of both sides, if there is any gain."""
        if self.elapsed_s <= 0:
            return "nothing ran, so there is nothing to balance"
        data = self.target_for_data_s / self.elapsed_s
        slots = self.target_for_slot_s / self.elapsed_s
        features = self.drafter_for_features_s / self.elapsed_s
        if max(data, slots, features) <= BALANCED_SHARE:
            return f"balanced: no side waited more than {BALANCED_SHARE:.0%} of the time"
        if data > max(slots, BALANCED_SHARE):  # then drafters starve too; that is no second cause
            return (
                f"targets waited {data:.0%} of the time for data: prepare it beforehand with"
                " `dflash data prepare`, or use a faster disk"
            )
        shared = sorted(set(targets) & set(drafters))
        if shared:
            return (
                f"target and drafter share {', '.join(shared)} (targets waited {slots:.0%}"
                f" of the time for a free slot, drafters {features:.0%} for features); a device"
                " for each side would keep them out of each other's way"
            )
        if features > slots:
            return (
                f"drafters waited {features:.0%} of the time for features: the target is the"
                f" bottleneck; give it more devices (now {len(targets)}) or raise"
                " data.anchor_density to draw more training from each forward"
            )
        return (
            f"targets waited {slots:.0%} of the time for a free slot: the drafter is the"
            f" bottleneck; give it more devices (now {len(drafters)}), or move one over from the"
            " target"
        )
