"""The block objective: weighted cross-entropy under the target's frozen head, and its metrics.

The head is frozen, so the loss' gradient with respect to the hidden states is made in the forward
pass, chunk by chunk: no [Q, V] logits are kept and nothing is recomputed. Slot 0 never reaches the
head. Everything is a sum; whoever reports a mean divides once, after adding sums up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from dflash.drafter.acceptance import accepted_lengths
from dflash.drafter.head import Head, head_gradient, head_logits
from dflash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """How slots are weighted.

    Attributes:
        kind: "decay" (arXiv 2602.06036, equation 4) or "dpace" (arXiv 2605.18810).
        gamma: decay length in slots, w_k = exp(-(k - 1) / gamma); None weighs all slots alike.
        dpace_alpha: floor of the confidence that D-PACE multiplies along a block.
        chunk_blocks: blocks whose logits exist at one time; memory, not results.
    """

    kind: Literal["decay", "dpace"] = "decay"
    gamma: float | None = 7.0
    dpace_alpha: float = 0.5
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("decay", "dpace"):
            raise ConfigError(f'objective.kind must be "decay" or "dpace", got {self.kind!r}')
        if self.gamma is not None and not (self.gamma > 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"objective.gamma must be positive and finite, got {self.gamma}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"objective.dpace_alpha must lie in [0, 1], got {self.dpace_alpha}")
        if self.chunk_blocks < 1:
            raise ConfigError(f"chunk_blocks must be at least 1, got {self.chunk_blocks}")


class Objective(NamedTuple):
    """Sums over one batch, all on the device.

    Attributes:
        loss_sum: float32, sum of weight times cross-entropy; differentiable in the hidden states.
        weight_sum: float32, sum of the same weights: the loss is loss_sum / weight_sum.
        supervised_slots: int64, number of supervised slots.
        correct_B, supervised_B: int64, right and all supervised slots by slot number.
        accepted_tokens: int64, accepted lengths (bonus included) summed over ``accepted_blocks``,
            the blocks with at least one supervised slot. These four are None without metrics.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    supervised_slots: Tensor
    correct_B: Tensor | None = None
    supervised_B: Tensor | None = None
    accepted_tokens: Tensor | None = None
    accepted_blocks: Tensor | None = None


class ChunkLoss(NamedTuple):
    """What ``chunk_loss`` makes of some whole blocks; rows are slots 1 to B - 1."""

    loss_sum: Tensor
    weight_sum: Tensor
    gradient_RD: Tensor
    correct: Tensor | None


ChunkFunction = Callable[..., ChunkLoss]


def block_objective(
    hidden_QD: Tensor,
    head: Head,
    labels_NB: Tensor,
    *,
    weight_NB: Tensor,
    settings: ObjectiveSettings,
    with_metrics: bool,
    chunk: ChunkFunction | None = None,
) -> Objective:
    """Compare each supervised slot with its label.

    Args:
        hidden_QD: the drafter's output.
        head: the target's, frozen: in the same dtype, or in 8 bits.
        labels_NB: int64, token of each slot.
        weight_NB: bool, True means supervised; slot 0 is False.
        settings: how slots are weighted.
        with_metrics: also find the best token of every slot.
        chunk: ``chunk_loss`` or a compiled form of it.
    """
    num_blocks, block_size = labels_NB.shape
    # Slot 0 is left out once, here; no chunk can bring it back.
    rows_RD = hidden_QD.view(num_blocks, block_size, -1)[:, 1:].flatten(0, 1)
    loss_sum, weight_sum, correct = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        rows_RD,
        head,
        labels_NB[:, 1:].contiguous(),
        weight_NB[:, 1:].contiguous(),
        (settings, with_metrics, chunk or chunk_loss),
    )
    supervised_slots = weight_NB.sum()
    if not with_metrics:
        return Objective(loss_sum, weight_sum, supervised_slots)
    correct_NB = F.pad(correct, (1, 0)) & weight_NB
    counted_N = weight_NB.any(dim=1)
    return Objective(
        loss_sum,
        weight_sum,
        supervised_slots,
        correct_B=correct_NB.sum(dim=0),
        supervised_B=weight_NB.sum(dim=0),
        accepted_tokens=(accepted_lengths(correct_NB, weight_NB) * counted_N).sum(),
        accepted_blocks=counted_N.sum(),
    )


def chunk_loss(
    rows_RD: Tensor,
    head: Head,
    labels: Tensor,
    *,
    supervised: Tensor,
    settings: ObjectiveSettings,
    with_metrics: bool,
) -> ChunkLoss:
    """Return loss, weights and d loss / d rows of whole blocks; a function that may be compiled.

    Args:
        rows_RD: hidden states of slots 1 to B - 1 of n blocks.
        head: the frozen head.
        labels: int64 [n, B - 1].
        supervised: bool [n, B - 1].
        settings: how slots are weighted.
        with_metrics: also say which slots' best token is the label.
    """
    logits_RV = head_logits(rows_RD, head)
    label_R1 = labels.reshape(-1, 1)
    # fp32 from here on: bf16 sums over a vocabulary are worthless. Written out, because Inductor
    # finds this form, and not logsumexp, worth one pass for maximum and sum together.
    wide_RV = logits_RV.float()
    peak_R1 = wide_RV.amax(dim=-1, keepdim=True)
    power_RV = (wide_RV - peak_R1).exp()
    sum_R1 = power_RV.sum(dim=-1, keepdim=True)
    at_label_R1 = logits_RV.gather(1, label_R1).float() - peak_R1 - sum_R1.log()
    ce = -at_label_R1.view(labels.shape)
    weight = slot_weights(ce, supervised, settings=settings)
    weight_R1 = weight.view(-1, 1)
    # d ce / d logits is the probability, less 1 at the label: written there apart, so that the
    # pass over the vocabulary compares nothing.
    off_label_R1 = -torch.expm1(at_label_R1)
    gradient_RD = head_gradient(
        power_RV * (weight_R1 / sum_R1),
        head,
        label_R1=label_R1,
        label_slope_R1=-off_label_R1 * weight_R1,
        largest_R1=torch.maximum(1 / sum_R1, off_label_R1) * weight_R1,
        dtype=rows_RD.dtype,
    )
    correct = None
    if with_metrics:
        correct = logits_RV.argmax(dim=-1).view(labels.shape) == labels
    return ChunkLoss((weight * ce).sum(), weight.sum(), gradient_RD, correct)


def slot_weights(ce: Tensor, supervised: Tensor, *, settings: ObjectiveSettings) -> Tensor:
    """Return float32 weights [n, B - 1] of slots 1 to B - 1; constants for the gradient.

    Args:
        ce: float32 [n, B - 1], cross-entropy of each slot (only D-PACE looks at it).
        supervised: bool [n, B - 1]; an unsupervised slot weighs 0.
        settings: which rule, and its number.
    """
    slot = torch.arange(ce.shape[1], dtype=torch.float32, device=ce.device)
    if settings.kind == "decay":
        decay = torch.ones_like(slot) if settings.gamma is None else (-slot / settings.gamma).exp()
        return torch.where(supervised, decay, 0.0)
    alpha = settings.dpace_alpha
    confidence = (1 - alpha) * (-ce.detach()).exp() + alpha
    prefix = torch.where(supervised, confidence, 1.0).cumprod(dim=1)
    reached = torch.where(supervised, prefix, 0.0)
    # A slot counts for as much as all slots that it lets decoding reach, itself included.
    suffix = reached.flip(1).cumsum(dim=1).flip(1)
    return torch.where(supervised, suffix, 0.0)


class _FrozenHeadLoss(torch.autograd.Function):
    """Loss over chunks of blocks; keeps d loss / d rows [R, D] and nothing else."""

    @staticmethod
    def forward(  # noqa: PLR0917  `apply` passes positional arguments only
        ctx: Any,  # noqa: ANN401  torch gives it no public type
        rows_RD: Tensor,
        head: Head,
        labels: Tensor,
        supervised: Tensor,
        how: tuple[ObjectiveSettings, bool, ChunkFunction],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        settings, with_metrics, chunk = how
        num_blocks, num_slots = labels.shape
        parts: list[ChunkLoss] = []
        for first in range(0, num_blocks, settings.chunk_blocks):
            blocks = slice(first, min(first + settings.chunk_blocks, num_blocks))
            part = chunk(
                rows_RD[blocks.start * num_slots : blocks.stop * num_slots],
                head,
                labels[blocks],
                supervised=supervised[blocks],
                settings=settings,
                with_metrics=with_metrics,
            )
            parts.append(part)
        ctx.save_for_backward(torch.cat([part.gradient_RD for part in parts]))
        loss_sum = torch.stack([part.loss_sum for part in parts]).sum()
        weight_sum = torch.stack([part.weight_sum for part in parts]).sum()
        correct = torch.cat([part.correct for part in parts]) if with_metrics else None  # type: ignore[misc]
        ctx.mark_non_differentiable(weight_sum, *([] if correct is None else [correct]))
        return loss_sum, weight_sum, correct

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient_RD,) = ctx.saved_tensors
        return (gradient_RD * slopes[0]).to(gradient_RD.dtype), None, None, None, None
