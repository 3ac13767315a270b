"""Products of 8-bit floats inside the drafter, against products in fp64 of what was rounded."""

from dataclasses import replace

import pytest
import torch
from drafter_cases import TINY, cpu_scales_rows
from torch import Tensor

from dflash.drafter import fp8
from dflash.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not cpu_scales_rows(), reason="this torch has no 8-bit products with row scales on a CPU"
)
ROWS, INPUTS, OUTPUTS = 32, 64, 48


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and the slope of the output; rows and columns of many sizes."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, INPUTS, generator=random) * torch.logspace(-2, 2, ROWS)[:, None]
    weight = torch.randn(OUTPUTS, INPUTS, generator=random) * torch.logspace(-1, 1, INPUTS)
    return x, weight, torch.randn(ROWS, OUTPUTS, generator=random)


def rounded(matrix: Tensor) -> Tensor:
    """Every row in units of its largest entry / 448, rounded to e4m3 by torch, in float64."""
    scale = matrix.abs().amax(dim=1, keepdim=True) / 448
    return (matrix / scale).to(torch.float8_e4m3fn).double() * scale.double()


def test_output_and_input_gradient_are_products_of_rows_rounded_to_e4m3() -> None:
    x, weight, slope = drawn()
    leaf = x.clone().requires_grad_()
    out = fp8.linear(leaf, weight)
    out.backward(slope)
    assert leaf.grad is not None
    expected = rounded(x) @ rounded(weight).t()
    expected_gradient = rounded(slope) @ rounded(weight.t()).t()
    for found, wanted in ((out.detach(), expected), (leaf.grad, expected_gradient)):
        size = wanted.abs().amax(dim=1, keepdim=True)
        off = ((found.double() - wanted).abs() / size).max()
        assert float(off) < 2**-8  # the output is bf16


def test_the_gradient_of_the_weight_is_not_rounded() -> None:
    x, weight, slope = drawn()
    leaf = weight.clone().requires_grad_()
    fp8.linear(x, leaf).backward(slope)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, slope.t() @ x, rtol=1e-6, atol=1e-6)


def test_leading_axes_pass_through() -> None:
    x, weight, _ = drawn()
    out = fp8.linear(x.view(2, 16, INPUTS), weight)
    assert out.shape == (2, 16, OUTPUTS)
    assert torch.equal(out.view(ROWS, OUTPUTS), fp8.linear(x, weight))


def test_a_row_of_zeros_stays_zeros() -> None:
    x, weight, _ = drawn()
    x[7] = 0
    out = fp8.linear(x, weight)
    assert torch.equal(out[7], torch.zeros(OUTPUTS))
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_scales_follow_the_size_of_the_numbers(size: float) -> None:
    x, weight, _ = drawn()
    found = fp8.linear(x * size, weight) / size
    torch.testing.assert_close(found, fp8.linear(x, weight), rtol=2**-6, atol=1e-3)


def test_widths_that_no_8_bit_product_has_are_named_together() -> None:
    fp8.require_widths(replace(TINY, vocab_size=50_256))
    with pytest.raises(ConfigError) as raised:
        fp8.require_widths(replace(TINY, vocab_size=50_257, intermediate_size=72))
    message = str(raised.value)
    assert "the vocabulary is 50257" in message
    assert "drafter.intermediate_size is 72" in message
    assert "hidden" not in message
