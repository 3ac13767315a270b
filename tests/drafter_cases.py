"""Small drafters and packed batches for the tests of ``dflash.drafter``."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.drafter.training import StepInputs
from dflash.drafter.zlab import from_zlab

GOLDEN = Path(__file__).parent / "golden"
TINY = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    block_size=8,
    mask_token_id=60,
    vocab_size=61,
    rope_theta=10_000.0,
)


def tiny_drafter(*, seed: int = 0, **changes: object) -> Drafter:
    """A drafter whose weights are large enough that every input matters."""
    drafter = Drafter(replace(TINY, **changes))
    drafter.initialise(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return drafter


def golden_tensors() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


def golden_weights() -> dict[str, Tensor]:
    return load_file(GOLDEN / "model.safetensors")


def golden_drafter() -> Drafter:
    drafter = Drafter(from_zlab(json.loads((GOLDEN / "config.json").read_text())))
    drafter.load_state_dict(golden_weights())
    return drafter


def packed(lengths: list[int], *, token_budget: int) -> tuple[Tensor, Tensor]:
    """Return documents_T and positions_T of documents laid end to end, then padding."""
    documents_T = torch.full((token_budget,), -1)
    positions_T = torch.zeros(token_budget, dtype=torch.int64)
    row = 0
    for document, length in enumerate(lengths):
        documents_T[row : row + length] = document
        positions_T[row : row + length] = torch.arange(length)
        row += length
    assert row <= token_budget
    return documents_T, positions_T


def step_inputs(
    lengths: list[int],
    *,
    token_budget: int,
    supervised_share: float = 1.0,
    shape: DrafterShape = TINY,
    seed: int = 0,
) -> StepInputs:
    """Random features and tokens; the loss mask has holes where the share is below 1."""
    random = torch.Generator().manual_seed(seed)
    documents_T, positions_T = packed(lengths, token_budget=token_budget)
    drawn_T = torch.rand(token_budget, generator=random) < supervised_share
    width = shape.num_taps * shape.hidden_size
    return StepInputs(
        features_TC=torch.randn(token_budget, width, generator=random),
        tokens_T=torch.randint(shape.vocab_size - 1, (token_budget,), generator=random),
        documents_T=documents_T,
        positions_T=positions_T,
        loss_mask_T=drawn_T & (documents_T >= 0),
        batch_number=torch.tensor(seed),
    )


def target_tables(shape: DrafterShape = TINY, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a random embedding_VD and lm_head_VD."""
    random = torch.Generator().manual_seed(seed)
    size = (shape.vocab_size, shape.hidden_size)
    return torch.randn(size, generator=random), torch.randn(size, generator=random)


def cpu_scales_rows() -> bool:
    """Whether this torch multiplies 8-bit matrices with a scale a row on a CPU."""
    eight = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    ones = torch.ones(16, 1)
    try:
        torch._scaled_mm(  # noqa: SLF001 - it has no public name on every torch
            eight, eight.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True
