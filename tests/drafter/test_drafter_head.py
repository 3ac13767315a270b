"""The head in 8 bits, against the rounding rules of e4m3 and e5m2 and products in fp64."""

import math
from typing import Literal

import oracles
import pytest
import torch
from drafter_cases import cpu_scales_rows
from torch import Tensor

from dflash.drafter.fp8 import E5M2, LARGEST
from dflash.drafter.head import ScaledHead, head_gradient, head_logits, scaled_head
from dflash.drafter.objective import ObjectiveSettings, block_objective

pytestmark = pytest.mark.skipif(
    not cpu_scales_rows(), reason="this torch has no 8-bit products with row scales on a CPU"
)
ROWS, WIDTH, VOCAB = 6, 32, 48


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows_RD and lm_head_VD whose rows and columns differ in size by powers of ten."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, WIDTH, generator=random)
    head = torch.randn(VOCAB, WIDTH, generator=random)
    head *= torch.logspace(-2, 1, VOCAB)[:, None] * torch.logspace(-1, 1, WIDTH)
    return rows, head


def nearest(value: float, *, mantissa_bits: int, smallest_exponent: int) -> float:
    """Round to nearest, ties to even, in a float format without overflow; in pure Python."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), smallest_exponent)
    unit = 2.0 ** (exponent - mantissa_bits)
    return round(value / unit) * unit


def rounded(x: Tensor, scale: Tensor, *, mantissa_bits: int, smallest_exponent: int) -> Tensor:
    wide, scales = x.double(), scale.double().expand_as(x)
    values = [
        nearest(v / s, mantissa_bits=mantissa_bits, smallest_exponent=smallest_exponent) * s
        for v, s in zip(wide.flatten().tolist(), scales.flatten().tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def test_the_head_is_rounded_by_row_and_by_column_to_e4m3() -> None:
    _, head = drawn()
    small = scaled_head(head)
    by_row = small.rows.values.double() * small.rows.scale.double()
    by_column = (small.columns.values.double() * small.columns.scale.double()).t()
    for found, axis in ((by_row, 1), (by_column, 0)):
        scale = head.abs().amax(dim=axis, keepdim=True).double() / 448
        expected = rounded(head, scale, mantissa_bits=3, smallest_exponent=-6)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        # 3 mantissa bits: half a unit in the last place is 1/16 of a normal number
        normal = (head.double() / scale).abs() >= 2**-6
        off = (found - head).abs() / head.abs()
        assert float(off[normal].max()) <= 1 / 16
        assert float(off.max()) > 1 / 64, "nothing was rounded"


def test_logits_are_the_product_of_what_was_rounded() -> None:
    rows, head = drawn()
    expected = torch.ones(1, dtype=torch.float64)
    sides = []
    for side in (rows, head):
        scale = side.abs().amax(dim=1, keepdim=True) / 448
        sides.append(rounded(side, scale, mantissa_bits=3, smallest_exponent=-6))
    expected = sides[0] @ sides[1].t()
    found = head_logits(rows, scaled_head(head)).double()
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-4)  # the output is bf16
    exact = rows.double() @ head.double().t()
    assert float((found - exact).abs().max()) > 0.01, "nothing was rounded"


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_the_gradient_keeps_the_label_exact_and_entries_ten_million_times_smaller(
    size: float,
) -> None:
    """One row of identity-like weights, so that each entry of the slope can be read off."""
    head = torch.eye(VOCAB)[:, :WIDTH].contiguous()
    slope = torch.full((1, VOCAB), 1e-7 * size)
    label = torch.tensor([[5]])
    gradient = head_gradient(
        slope,
        scaled_head(head),
        label_R1=label,
        label_slope_R1=torch.tensor([[-0.75 * size]]),
        largest_R1=torch.tensor([[0.75 * size]]),
        dtype=torch.float32,
    )
    assert float(gradient[0, 5]) == pytest.approx(-0.75 * size, rel=2**-8)
    others = torch.cat([gradient[0, :5], gradient[0, 6:]])
    torch.testing.assert_close(
        others, torch.full_like(others, 1e-7 * size), rtol=1 / 8 + 2**-8, atol=0
    )


def test_a_row_that_weighs_nothing_has_no_gradient_and_no_nan() -> None:
    _, head = drawn()
    gradient = head_gradient(
        torch.zeros(2, VOCAB),
        scaled_head(head),
        label_R1=torch.tensor([[1], [2]]),
        label_slope_R1=torch.zeros(2, 1),
        largest_R1=torch.zeros(2, 1),
        dtype=torch.float32,
    )
    assert torch.equal(gradient, torch.zeros(2, WIDTH))


def test_a_head_row_of_zeros_gives_logits_of_zero() -> None:
    rows, head = drawn()
    head[3] = 0
    logits = head_logits(rows, scaled_head(head))
    assert torch.equal(logits[:, 3], torch.zeros(ROWS))
    assert bool(logits.isfinite().all())


def test_the_largest_slope_is_a_power_of_two_that_e5m2_holds() -> None:
    assert float(torch.tensor(LARGEST[E5M2]).to(E5M2)) == LARGEST[E5M2]
    assert math.log2(LARGEST[E5M2]) == int(math.log2(LARGEST[E5M2]))


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_loss_and_gradient_in_8_bits_stay_near_those_of_autograd(
    kind: Literal["decay", "dpace"],
) -> None:
    """Random hidden states are the hard case: each logit is a sum of as many unlike products."""
    random = torch.Generator().manual_seed(3)
    blocks, block, width, vocab = 16, 8, 256, 512
    hidden = torch.randn(blocks * block, width, generator=random)
    head = torch.randn(vocab, width, generator=random) * 2 * width**-0.5
    labels = torch.randint(vocab, (blocks, block), generator=random)
    weight = (torch.arange(block) > 0).expand(blocks, block).contiguous()
    leaf = hidden.clone().requires_grad_()
    loss, total = oracles.full_logits_loss(
        leaf,
        head,
        labels,
        weight_NB=weight,
        gamma=7.0 if kind == "decay" else None,
        dpace_alpha=0.5 if kind == "dpace" else None,
    )
    (expected,) = torch.autograd.grad(loss, leaf)
    mine = hidden.clone().requires_grad_()
    settings = ObjectiveSettings(kind=kind, gamma=7.0, dpace_alpha=0.5)
    small = scaled_head(head)
    assert isinstance(small, ScaledHead)
    found = block_objective(
        mine, small, labels, weight_NB=weight, settings=settings, with_metrics=True
    )
    found.loss_sum.backward()
    assert mine.grad is not None
    mean = float(found.loss_sum.detach() / found.weight_sum)
    assert mean == pytest.approx(float(loss.detach() / total), rel=0.01)
    cosine = torch.nn.functional.cosine_similarity(mine.grad.flatten(), expected.flatten(), dim=0)
    assert float(cosine) > 0.995
    assert float(mine.grad.norm() / expected.norm()) == pytest.approx(1, rel=0.02)
