"""Matrix products of 8-bit floats: both sides scaled by row of what is summed over.

A matrix is divided, group by group, so that the largest number of a group is the largest one that
the format holds; a group is a row of the left side or a column of the right one, so the product's
entries are scaled back one by one (the "rowwise" recipe of torchao's float8 training). Accumulation
is fp32. Needs a GPU of compute capability 8.9 or more. A CPU makes the same products slowly with
torch 2.13; torch 2.11 takes one scale a matrix there.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.drafter.shape import DrafterShape
from dflash.errors import ConfigError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 32768.0}
"""What a group's largest number becomes: of e4m3 the largest there is, of e5m2 the largest power of
two, so that it is kept exactly."""

MULTIPLE = 16  # of both widths, torch._scaled_mm's own requirement


class Scaled(NamedTuple):
    """``values * scale`` is the matrix: values [R, C] in 8 bits, scale float32 [R, 1]."""

    values: Tensor
    scale: Tensor


def require_widths(shape: DrafterShape) -> None:
    """Check that every product of a drafter and its target's head can be made.

    Raises:
        ConfigError: names each width that is not a multiple of ``MULTIPLE``.
    """
    require_multiples(
        {
            "the hidden size": shape.hidden_size,
            "the vocabulary": shape.vocab_size,
            "drafter.intermediate_size": shape.intermediate_size,
            "the query width": shape.num_heads * shape.head_dim,
            "the key width": shape.num_kv_heads * shape.head_dim,
        }
    )


def require_multiples(widths: Mapping[str, int]) -> None:
    """The same of the widths that are known, by what they are called.

    Raises:
        ConfigError: as ``require_widths``.
    """
    odd = [f"{what} is {width}" for what, width in widths.items() if width % MULTIPLE]
    if odd:
        raise ConfigError(
            f"precision.matmul in 8 bits needs widths in multiples of {MULTIPLE}: {', '.join(odd)}",
            hint='set precision.matmul = "bf16"',
        )


def by_row(matrix: Tensor, *, dtype: torch.dtype = E4M3, largest: Tensor | None = None) -> Scaled:
    """Round *matrix* [R, C] to 8 bits, row by row.

    Args:
        matrix: of any float dtype.
        dtype: ``E4M3`` or ``E5M2``.
        largest: float [R, 1], where it is known: no number of the row is larger in size.
    """
    if largest is None:
        largest = matrix.abs().amax(dim=1, keepdim=True)
    # A row of zeros gets a scale too, and stays zeros.
    tiny = torch.finfo(torch.float32).tiny * LARGEST[dtype]
    scale = largest.float().clamp(min=tiny) / LARGEST[dtype]
    return Scaled((matrix.float() / scale).to(dtype), scale)


def product(left: Scaled, right: Scaled, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return left @ right.T in *dtype*; both are scaled by row, and summed over their columns.

    Args:
        fast: sum in the tensor cores' own registers, some 14 bits wide, to the end, instead of
            adding to fp32 every few terms. For gradients torchao takes the slower way, and so do
            we: the head's are sums over the whole vocabulary.
    """
    # Row-scaled products come out in bf16 alone (CUDA); fp32 activations exist on a CPU only.
    out: Tensor = torch._scaled_mm(  # noqa: SLF001 - public only from 2.10, and not for Inductor
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return out.to(dtype)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; the gradient of the weight is made in the activations' own dtype.

    That one sums over tokens, where a few rows can be far larger than the rest; it is also what
    the optimizer accumulates (torchao's "rowwise with high-precision weight gradient").
    """
    out: Tensor = _Linear.apply(x, weight_OI)  # type: ignore[no-untyped-call]
    return out if bias_O is None else out + bias_O


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch gives it no public type
        x: Tensor,
        weight_OI: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        x_RI = x.reshape(-1, x.shape[-1])
        out_RO = product(by_row(x_RI), by_row(weight_OI), dtype=x.dtype, fast=True)
        return out_RO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        x, weight_OI = ctx.saved_tensors
        slope_RO = slopes[0].reshape(-1, slopes[0].shape[-1])
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            transposed_IO = by_row(weight_OI.t().contiguous())
            for_x = product(by_row(slope_RO), transposed_IO, dtype=x.dtype, fast=False)
            for_x = for_x.view(x.shape)
        if ctx.needs_input_grad[1]:
            for_weight = slope_RO.t() @ x.reshape(-1, x.shape[-1])
        return for_x, for_weight
