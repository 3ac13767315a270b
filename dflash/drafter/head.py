"""The target's frozen head: its two products, in the activations' dtype or in 8-bit floats.

A head that never changes is rounded to 8 bits once: by vocabulary row for logits = rows @ head.T,
and by hidden column for the gradient = slope @ head, each group scaled so that its largest weight
is the largest e4m3 number. Activations are scaled by row at each use. The slope keeps the range of
e5m2 (2 mantissa bits, 32 binades), because almost all of a softmax is tiny: in e4m3 whatever is
below 4e-6 of a row's largest entry would be 0. Accumulation is fp32, the result bf16 or fp32.
Needs a GPU of compute capability 8.9 or more; a CPU computes the same products slowly.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

WEIGHTS, SLOPES = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_WEIGHT = 448.0  # of e4m3
LARGEST_SLOPE = 32768.0  # the largest power of two in e5m2: the label's own entry is then exact
_ROWS_AT_A_TIME = 8192


class ScaledHead(NamedTuple):
    """A head [V, D] in 8-bit floats, once for each of its two products.

    Attributes:
        rows_VD: e4m3; row_scale_1V: float32, rows_VD times its transpose is the head.
        columns_DV: e4m3, transposed; column_scale_1D: float32.
    """

    rows_VD: Tensor
    row_scale_1V: Tensor
    columns_DV: Tensor
    column_scale_1D: Tensor


Head = Tensor | ScaledHead
"""The head in the activations' dtype [V, D], or in 8 bits."""


@torch.no_grad()
def scaled_head(lm_head_VD: Tensor) -> ScaledHead:
    """Round *lm_head_VD* to 8 bits, both ways; 2 V D bytes, made a few thousand rows at a time."""
    row_scale_V1 = _scale(lm_head_VD.abs().amax(dim=1, keepdim=True), LARGEST_WEIGHT)
    column_scale_1D = _scale(lm_head_VD.abs().amax(dim=0, keepdim=True), LARGEST_WEIGHT)
    rows_VD = torch.empty_like(lm_head_VD, dtype=WEIGHTS)
    columns_DV = torch.empty(lm_head_VD.shape[::-1], dtype=WEIGHTS, device=lm_head_VD.device)
    for first in range(0, len(lm_head_VD), _ROWS_AT_A_TIME):
        some = slice(first, first + _ROWS_AT_A_TIME)
        wide = lm_head_VD[some].float()
        rows_VD[some] = (wide / row_scale_V1[some]).to(WEIGHTS)
        columns_DV[:, some] = (wide / column_scale_1D).to(WEIGHTS).t()
    return ScaledHead(rows_VD, row_scale_V1.t().contiguous(), columns_DV, column_scale_1D)


def head_logits(rows_RD: Tensor, head: Head) -> Tensor:
    """Return logits_RV in the dtype of *rows_RD*."""
    if isinstance(head, Tensor):
        return F.linear(rows_RD, head)
    scale_R1 = _scale(rows_RD.abs().amax(dim=1, keepdim=True), LARGEST_WEIGHT)
    small_RD = (rows_RD.float() / scale_R1).to(WEIGHTS)
    right = (head.rows_VD.t(), head.row_scale_1V)
    return _product((small_RD, scale_R1), right, dtype=rows_RD.dtype)


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
    scale_R1 = _scale(largest_R1, LARGEST_SLOPE)
    small_RV = (slope_RV / scale_R1).to(SLOPES)
    # As bytes: torch scatters no 8-bit floats.
    label_slope = (label_slope_R1 / scale_R1).to(SLOPES).view(torch.uint8)
    small_RV.view(torch.uint8).scatter_(1, label_R1, label_slope)
    right = (head.columns_DV.t(), head.column_scale_1D)
    return _product((small_RV, scale_R1), right, dtype=dtype)


def _scale(largest: Tensor, representable: float) -> Tensor:
    """float32, by which a group is divided; groups of zeros get a scale too, and stay zeros."""
    return largest.float().clamp(min=torch.finfo(torch.float32).tiny * 1e6) / representable


def _product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], *, dtype: torch.dtype
) -> Tensor:
    """Multiply two 8-bit matrices, each with its scales."""
    # Row-scaled products come out in bf16 alone (CUDA); fp32 activations exist on a CPU only.
    out: Tensor = torch._scaled_mm(  # noqa: SLF001 - public only from 2.10, and then not for Inductor
        left[0],
        right[0],
        scale_a=left[1],
        scale_b=right[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.to(dtype)
