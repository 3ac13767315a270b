"""What a step measures, summed on the device and divided once, on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.objective import Objective

_SCALARS = ("loss_sum", "weight_sum", "supervised_slots", "accepted_tokens", "accepted_blocks")


@dataclass(frozen=True, slots=True)
class Averages:
    """Averages over some steps; None where nothing was measured."""

    loss: float | None
    grad_norm: float | None
    token_accuracy: float | None
    accepted_tokens_per_block: float | None


class Totals:
    """Numerators and denominators in float64, in one tensor, so that reading is one small copy.

    Batches add to ``step_sums``, which the replicas then sum; ``end_step`` adds those to ``sums``,
    which therefore cover every replica and every step since ``zero``.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        width = len(_SCALARS) + 2 * block_size
        self.sums = torch.zeros(width + 2, dtype=torch.float64, device=device)
        self.step_sums = torch.zeros(width, dtype=torch.float64, device=device)
        self.loss_sum = self.step_sums[0]
        self.weight_sum = self.step_sums[1]

    def zero(self) -> None:
        """Forget everything but the step in progress."""
        self.sums.zero_()

    def add(self, objective: Objective) -> None:
        """Add one batch's sums to those of the step in progress."""
        parts = [objective.loss_sum.detach(), objective.weight_sum, objective.supervised_slots]
        if objective.correct_B is None:
            self.step_sums[:3] += torch.stack([part.double() for part in parts])
            return
        assert objective.supervised_B is not None
        assert objective.accepted_tokens is not None
        assert objective.accepted_blocks is not None
        parts += [objective.accepted_tokens, objective.accepted_blocks]
        scalars = torch.stack([part.double() for part in parts])
        self.step_sums += torch.cat([scalars, objective.correct_B, objective.supervised_B])

    def end_step(self, grad_norm: Tensor) -> None:
        """Close the step in progress, with its gradient norm."""
        self.sums[:-2] += self.step_sums
        self.sums[-2] += grad_norm
        self.sums[-1] += 1
        self.step_sums.zero_()


def averages(sums: Tensor) -> Averages:
    """Divide a host copy of ``Totals.sums``."""
    scalar = dict(zip(_SCALARS, sums.tolist(), strict=False))
    correct_B, supervised_B = sums[len(_SCALARS) : -2].chunk(2)
    return Averages(
        loss=_ratio(scalar["loss_sum"], scalar["weight_sum"]),
        grad_norm=_ratio(float(sums[-2]), float(sums[-1])),
        token_accuracy=_ratio(float(correct_B.sum()), float(supervised_B.sum())),
        accepted_tokens_per_block=_ratio(scalar["accepted_tokens"], scalar["accepted_blocks"]),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
