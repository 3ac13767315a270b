"""Weights in bf16 without fp32 masters: what moves less than half a step of bf16 never moves.

Symptom
    No message. The loss falls, then stays where it is; some tensors of the last checkpoint equal
    the first one's bit for bit. (Reported: 78 % of the entries of query and key norms.)
Mechanism
    bf16 keeps 8 significant bits, so just below 1 its numbers are 2**-8 apart, and above it 2**-7.
    AdamW moves an entry by about the learning rate a step, 6e-4 at most. Added to a norm's weight
    of 1.0 that is less than half the distance to the next number, and is rounded away: at every
    step anew. Weights around 0.02 freeze the same way once the schedule is below 6e-5.
Reproduce
    Eight steps of the production training step in bf16 at the paper's peak learning rate. The fault
    keeps the weights themselves in bf16. The number is the share of norm weights which, for all
    their gradients, end as they began.
Remedy
    ``dflash.train.adamw.MasterAdamW``: fp32 masters, of which bf16 weights are copies.
Verify
    The share is exactly 0.0 with masters.
Versions
    Any torch: it is how bf16 rounds. Seen on a CPU with every version this page's test runs on.
Sources
    https://github.com/NVIDIA/Model-Optimizer/pull/2322 and /2483 (bf16 AdamW froze 78 % of q/k-norm
    entries; masters lost on resume)
    AutoModel train_dflash.py:348: AdamW on bf16 weights, no masters.
    SpecForge optimizer.py:12 and speculators trainer.py:459 keep fp32 masters.
"""

import torch

from dflash.failures._example import SHAPE, packed_batch, small_loss
from dflash.failures._mode import FailureMode
from dflash.train.adamw import AdamSettings, MasterAdamW
from dflash.train.step import TrainStep

LENGTHS, NUM_STEPS, LR = [40, 24], 8, 6e-4  # lr: arXiv 2602.06036 A.1
SETTINGS = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the share of norm weights that have had gradients and never moved."""
    dtype = torch.bfloat16
    loss = small_loss(num_anchors=16, seed=seed, dtype=dtype)
    step = TrainStep(loss, SETTINGS, token_budget=sum(LENGTHS), features_dtype=dtype)
    if faulty:
        masters = step.adam.masters
        masters.update({name: w.to(dtype) for name, w in masters.items()})  # the fault: no masters
    for name, tensor in packed_batch(LENGTHS, seed=seed, dtype=dtype)._asdict().items():
        step.inputs[name].copy_(tensor)
    step.set_lr(LR)
    before = {name: weight.clone() for name, weight in step.masters.items()}
    for number in range(NUM_STEPS):
        step.batch.batch_number.fill_(number)
        step.parts["normal"]()
        step.parts["update"]()

    still = trained = 0
    for (name, weight), mean in zip(step.masters.items(), step.adam.means, strict=True):
        if weight.ndim == 1:
            had_gradients = mean != 0
            still += int(((weight == before[name]) & had_gradients).sum())
            trained += int(had_gradients.sum())
    assert trained >= SHAPE.hidden_size, "the norms have no gradients"
    return still / trained


MODE = FailureMode(
    slug="frozen-bf16",
    measures="share of trained norm weights that never moved",
    unit="1",
    limit=0.0,
    reproduce=reproduce,
    remedy=MasterAdamW,
)
