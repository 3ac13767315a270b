"""The trainer's own step on random features and weights."""

import torch
from torch import Tensor

from dflash.config.sections import Matmul
from dflash.drafter.head import head_for
from dflash.drafter.model import Drafter
from dflash.drafter.training import BlockLoss, StepInputs
from dflash.train.adamw import AdamSettings
from dflash.train.step import TrainStep
from dflash_bench.documents import numbered_seed
from dflash_bench.shapes import BenchShape

Tables = tuple[Tensor, Tensor]
"""The frozen target's embedding and LM head on one device; its drafters share them."""


def make_tables(shape: BenchShape, *, device: torch.device, seed: int = 0) -> Tables:
    """Draw them; bf16 on a GPU, fp32 on a CPU."""
    random = torch.Generator(device).manual_seed(seed)
    size = (shape.drafter.vocab_size, shape.drafter.hidden_size)
    one, other = (torch.empty(size, device=device, dtype=dtype_of(device)) for _ in range(2))
    return one.normal_(std=0.02, generator=random), other.normal_(std=0.02, generator=random)


def dtype_of(device: torch.device) -> torch.dtype:
    """What ``precision.compute = "auto"`` is there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_step(
    shape: BenchShape,
    *,
    device: torch.device,
    seed: int = 0,
    matmul: Matmul = "bf16",
    tables: Tables | None = None,
    data_seed: int = 0,
) -> TrainStep:
    """Build a training step on a batch of random features; bf16 on a GPU, fp32 on a CPU."""
    embedding_VD, lm_head_VD = tables or make_tables(shape, device=device, seed=seed)
    drafter = Drafter(shape.drafter)
    drafter.initialise(seed)
    drafter.to(device)
    loss = BlockLoss(
        drafter,
        embedding_VD=embedding_VD,
        head=head_for(lm_head_VD, matmul),
        settings=shape.objective,
        num_anchors=shape.num_anchors,
        seed=seed,
        attention="split" if device.type == "cpu" else "flex",
        checkpoint=shape.activation_checkpointing,
    )
    settings = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)
    dtype = dtype_of(device)
    step = TrainStep(loss, settings, token_budget=shape.token_budget, features_dtype=dtype)
    random = torch.Generator(device).manual_seed(numbered_seed(seed, data_seed + 1))
    inputs = random_inputs(shape, device=device, dtype=dtype, generator=random)
    for name, tensor in inputs._asdict().items():
        step.inputs[name].copy_(tensor)
    return step


def random_inputs(
    shape: BenchShape, *, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> StepInputs:
    """Return random features and tokens of documents of equal length, all supervised."""
    num_tokens, length = shape.token_budget, shape.token_budget // shape.num_documents
    position = torch.arange(num_tokens, device=device)
    width = shape.drafter.num_taps * shape.drafter.hidden_size
    return StepInputs(
        features_TC=torch.randn(num_tokens, width, device=device, dtype=dtype, generator=generator),
        tokens_T=torch.randint(
            0, shape.drafter.vocab_size, (num_tokens,), device=device, generator=generator
        ),
        documents_T=(position // length).clamp(max=shape.num_documents - 1),
        positions_T=position % length,
        loss_mask_T=torch.ones(num_tokens, device=device, dtype=torch.bool),
        batch_number=torch.zeros((), device=device, dtype=torch.int64),
    )
