"""Who waits for whom, and what to do about it."""

from dataclasses import dataclass

BALANCED_SHARE = 0.05
"""Below this share of the run's time a wait is not worth rearranging devices for."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of waiting, each averaged over the workers of its side, in *elapsed_s* of running."""

    elapsed_s: float
    target_for_slot_s: float
    drafter_for_features_s: float
    target_for_data_s: float

    def suggestion(self, *, num_targets: int, num_drafters: int) -> str:
        """One line on how to rebalance, or that there is nothing to gain."""
        if self.elapsed_s <= 0:
            return "nothing ran, so there is nothing to balance"
        data, slots, features = (
            wait / self.elapsed_s
            for wait in (
                self.target_for_data_s,
                self.target_for_slot_s,
                self.drafter_for_features_s,
            )
        )
        if data > max(BALANCED_SHARE, slots):
            return (
                f"targets waited {data:.0%} of the time for data: prepare the data beforehand"
                " with `dflash data prepare`, or use a faster disk"
            )
        if features > max(BALANCED_SHARE, slots):
            return (
                f"drafters waited {features:.0%} of the time for features: the target is the"
                f" bottleneck; give it more devices (now {num_targets}) or raise"
                " data.anchor_density to draw more training from each forward"
            )
        if slots > BALANCED_SHARE:
            return (
                f"targets waited {slots:.0%} of the time for a free slot: the drafter is the"
                f" bottleneck; give it more devices (now {num_drafters}), or move one over from the"
                " target"
            )
        return "balanced: neither side waited more than 5% of the time"
