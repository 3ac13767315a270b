"""A small drafter and packed batches, for pages that run a whole step in a moment."""

from dataclasses import replace

import torch
from torch import Tensor

from dflash.drafter.attention import Attention
from dflash.drafter.model import Drafter
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.shape import DrafterShape
from dflash.drafter.training import BlockLoss, StepInputs

CPU = torch.device("cpu")
SHAPE = DrafterShape(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    block_size=8,
    mask_token_id=63,
    vocab_size=64,
    rope_theta=10_000.0,
)


def small_loss(
    *,
    num_anchors: int,
    seed: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    attention: Attention = "split",
    num_layers: int = SHAPE.num_layers,
) -> BlockLoss:
    """Return the production step's loss of a random drafter under a random frozen target."""
    random = torch.Generator().manual_seed(seed)
    drafter = Drafter(replace(SHAPE, num_layers=num_layers)).to(device)
    drafter.initialise(seed)
    size = (SHAPE.vocab_size, SHAPE.hidden_size)
    embedding_VD, head_VD = (
        torch.randn(size, generator=random).to(device, dtype) for _ in range(2)
    )
    return BlockLoss(
        drafter,
        embedding_VD=embedding_VD,
        head=head_VD,
        settings=ObjectiveSettings(),
        num_anchors=num_anchors,
        seed=seed,
        attention=attention,
    )


def packed_batch(
    lengths: list[int],
    *,
    seed: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> StepInputs:
    """Return documents of *lengths* laid end to end, all supervised, with random features."""
    random = torch.Generator().manual_seed(seed)
    documents_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    width = SHAPE.num_taps * SHAPE.hidden_size
    drawn: list[Tensor] = [
        torch.randn(sum(lengths), width, generator=random).to(dtype),
        torch.randint(SHAPE.mask_token_id, (sum(lengths),), generator=random),
        documents_T,
        torch.cat([torch.arange(length) for length in lengths]),
        torch.ones_like(documents_T, dtype=torch.bool),
        torch.tensor(seed),
    ]
    return StepInputs(*(tensor.to(device) for tensor in drawn))
