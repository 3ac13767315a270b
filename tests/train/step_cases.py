"""Training steps over small random batches, one replica or several, all on the CPU."""

import torch
from drafter_cases import TINY, step_inputs, target_tables, tiny_drafter

from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.training import BlockLoss, StepInputs
from dflash.train.adamw import AdamSettings
from dflash.train.step import TrainStep

SETTINGS = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=0.5)
GAMMA = 4.0


def batch(seed: int) -> StepInputs:
    """Two documents in 48 positions, a few of them not supervised; other seeds, other batches."""
    lengths = [20 + seed % 5, 17]
    return step_inputs(lengths, token_budget=48, supervised_share=0.9, seed=seed)


def load(step: TrainStep, inputs: StepInputs) -> None:
    """Make *inputs* what the step reads."""
    for name, tensor in inputs._asdict().items():
        step.inputs[name].copy_(tensor)


def make_step(
    inputs: StepInputs | None = None,
    *,
    settings: AdamSettings = SETTINGS,
    checkpoint: bool = False,
    kind: str = "decay",
) -> TrainStep:
    """A step that reads *inputs*; equal weights each time."""
    embedding_VD, lm_head_VD = target_tables(TINY)
    loss = BlockLoss(
        tiny_drafter(),
        embedding_VD=embedding_VD,
        head=lm_head_VD,
        settings=ObjectiveSettings(
            kind="dpace" if kind == "dpace" else "decay",
            gamma=GAMMA if kind == "decay" else None,
            chunk_blocks=3,
        ),
        num_anchors=8,
        seed=5,
        attention="sdpa",
        checkpoint=checkpoint,
    )
    step = TrainStep(loss, settings, token_budget=48, features_dtype=torch.float32)
    if inputs is not None:
        load(step, inputs)
    return step
