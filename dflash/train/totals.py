"""What a step measures, summed on the device and divided once, on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.objective import Objective

_SCALARS = (
    "loss_sum",
    "weight_sum",
    "supervised_slots",
    "accepted_tokens",
    "accepted_blocks",
    "grad_norm_sum",
    "steps",
)


@dataclass(frozen=True, slots=True)
class Averages:
    """Averages over everything since the last reading; None where nothing was measured."""

    loss: float | None
    grad_norm: float | None
    supervised_slots: int
    token_accuracy: float | None
    accepted_tokens_per_block: float | None
    accuracy_per_slot: list[float]


class Totals:
    """Numerators and denominators in float64, in one tensor, so that reading is one small copy."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self.sums = torch.zeros(len(_SCALARS) + 2 * block_size, dtype=torch.float64, device=device)

    def zero(self) -> None:
        self.sums.zero_()

    def add(self, objective: Objective) -> None:
        """Add one batch's sums."""
        parts = [objective.loss_sum.detach(), objective.weight_sum, objective.supervised_slots]
        if objective.correct_B is None:
            self.sums[:3] += torch.stack([part.double() for part in parts])
            return
        assert objective.supervised_B is not None
        assert objective.accepted_tokens is not None
        assert objective.accepted_blocks is not None
        parts += [objective.accepted_tokens, objective.accepted_blocks]
        self.sums[:5] += torch.stack([part.double() for part in parts])
        self.sums[len(_SCALARS) :] += torch.cat([objective.correct_B, objective.supervised_B])

    def end_step(self, grad_norm: Tensor) -> None:
        """Count one optimizer step and its gradient norm."""
        self.sums[5] += grad_norm
        self.sums[6] += 1

    def averages(self, sums: Tensor) -> Averages:
        """Divide a host copy of ``sums`` (float64, on the CPU)."""
        scalar = dict(zip(_SCALARS, sums.tolist(), strict=False))
        per_slot = sums[len(_SCALARS) :].view(2, self._block_size)
        correct_B, supervised_B = per_slot[0], per_slot[1]
        return Averages(
            loss=_ratio(scalar["loss_sum"], scalar["weight_sum"]),
            grad_norm=_ratio(scalar["grad_norm_sum"], scalar["steps"]),
            supervised_slots=int(scalar["supervised_slots"]),
            token_accuracy=_ratio(float(correct_B.sum()), float(supervised_B.sum())),
            accepted_tokens_per_block=_ratio(scalar["accepted_tokens"], scalar["accepted_blocks"]),
            accuracy_per_slot=[
                correct / supervised
                for correct, supervised in zip(
                    correct_B.tolist(), supervised_B.tolist(), strict=True
                )
                if supervised
            ],
        )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
