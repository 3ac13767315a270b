"""The target's frozen head: its two products, in the activations' dtype or in 8-bit floats.

A head that never changes is rounded to 8 bits once: by vocabulary row for logits = rows @ head.T,
and by hidden column for the gradient = slope @ head. Activations are rounded at each use, the slope
to e5m2 (2 mantissa bits, 32 binades), because almost all of a softmax is tiny: in e4m3 whatever is
below 4e-6 of a row's largest entry would be 0.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from dflash.drafter.fp8 import E4M3, E5M2, Scaled, by_row, product

_ROWS_AT_A_TIME = 8192


class ScaledHead(NamedTuple):
    """A head [V, D] in e4m3, once for each of its two products.

    Attributes:
        rows: values_VD, for the logits.
        columns: values_DV, the head transposed, for the gradient.
        alone: whether the drafter's own products stay as wide as its activations.
    """

    rows: Scaled
    columns: Scaled
    alone: bool = False


Head = Tensor | ScaledHead
"""The head in the activations' dtype [V, D], or in 8 bits."""


@torch.no_grad()
def scaled_head(lm_head_VD: Tensor, *, alone: bool = False) -> ScaledHead:
    """Round *lm_head_VD* to 8 bits, both ways; 2 V D bytes, made a few thousand rows at a time."""
    largest_D = lm_head_VD.abs().amax(dim=0)
    num_rows, width = lm_head_VD.shape
    columns_DV = torch.empty(width, num_rows, dtype=E4M3, device=lm_head_VD.device)
    parts = []
    for first in range(0, num_rows, _ROWS_AT_A_TIME):
        some_rD = lm_head_VD[first : first + _ROWS_AT_A_TIME]
        parts.append(by_row(some_rD))
        column = by_row(some_rD.t(), largest=largest_D[:, None])
        columns_DV[:, first : first + _ROWS_AT_A_TIME] = column.values
    rows = Scaled(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
    return ScaledHead(rows, Scaled(columns_DV, column.scale), alone)


def head_for(lm_head_VD: Tensor, matmul: Literal["bf16", "fp8", "fp8-head"]) -> Head:
    """Return the head as ``precision.matmul`` wants it."""
    if matmul == "bf16":
        return lm_head_VD
    return scaled_head(lm_head_VD, alone=matmul == "fp8-head")


def head_logits(rows_RD: Tensor, head: Head) -> Tensor:
    """Return logits_RV in the dtype of *rows_RD*."""
    if isinstance(head, Tensor):
        return F.linear(rows_RD, head)
    return product(by_row(rows_RD), head.rows, dtype=rows_RD.dtype, fast=True)


def head_gradient(
    slope_RV: Tensor,
    head: Head,
    *,
    label_R1: Tensor,
    label_slope_R1: Tensor,
    largest_R1: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return slope @ head [R, D] in *dtype*, where the slope at the label is another.

    Args:
        slope_RV: float32, everywhere but at the label.
        head: what made the logits.
        label_R1: int64 column of the label; label_slope_R1: float32, the slope there.
        largest_R1: float32, no slope of the row is larger in size.
        dtype: of the result.
    """
    if isinstance(head, Tensor):
        small_RV = slope_RV.to(dtype)
        small_RV.scatter_(1, label_R1, label_slope_R1.to(dtype))
        return small_RV @ head
    slope = by_row(slope_RV, dtype=E5M2, largest=largest_R1)
    label_slope = (label_slope_R1 / slope.scale).to(E5M2)
    # As bytes: torch scatters no 8-bit floats.
    slope.values.view(torch.uint8).scatter_(1, label_R1, label_slope.view(torch.uint8))
    return product(slope, head.columns, dtype=dtype, fast=False)
