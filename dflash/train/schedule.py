"""The learning rate as a pure function of the step, so that it needs no state to resume."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cosine:
    """Linear warm-up to ``peak``, then half a cosine down to ``floor`` at ``num_steps``.

    The recipe of arXiv 2602.06036 A.1: peak 6e-4, warm-up over 4 % of the steps, cosine.
    """

    peak: float
    floor: float
    warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """Learning rate of optimizer step *step*, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.num_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
