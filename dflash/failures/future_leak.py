"""A drafted slot reads the tokens it is meant to predict.

Symptom
    No message. The training loss is far below what it should be so early and accuracy far above
    what decoding then accepts. (Reported: acceptance collapses, the more so the more anchors.)
Mechanism
    At training time the context holds the whole sequence, the answer included. Slot k of the block
    at anchor a predicts token a + k, so it may read context positions < a only. One position too
    many and the target's hidden state at a, which encodes token a + 1, is copied instead of
    predicted. At decoding time that position does not exist yet.
Reproduce
    Prepare a batch with the production step, open the one column at the anchor, change the
    target's features from the anchor on, and measure how far the drafter's output moves.
Remedy
    ``dflash.drafter.masks.context_mask``: the bound is strict, ``row < anchor``. Dense, split and
    tiled masks are held to it by tests.
Verify
    The output moves by exactly 0.0, not "a little": a masked column has weight 0 in the sum.
Versions
    Any torch: the mistake is in the program. Seen on a CPU with every version this page's test
    runs on.
Sources
    SpecForge dflash_family_model.py:108-110 states the same bound and why; in all four public
    trainers the context is kv < anchor today.
    https://github.com/sgl-project/SpecForge/issues/470 (many anchors leak across blocks)
    https://github.com/sgl-project/SpecForge/pull/473 (mask, tied weights and positions were wrong)
"""

import torch
from torch import Tensor

from dflash.diagnose.acceptance import accepted_in_training_alone
from dflash.drafter.masks import context_mask
from dflash.failures._example import packed_batch, small_loss
from dflash.failures._mode import FailureMode

CONTEXT = 48


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return max |change| of the drafter's output when the features of its answer are altered."""
    loss = small_loss(num_anchors=1, seed=seed)
    inputs = packed_batch([CONTEXT], seed=seed)
    prepared = loss.prepare(inputs)
    anchor = int(prepared.positions_Q[0])
    if faulty:
        assert isinstance(prepared.mask, Tensor)
        prepared.mask[:, anchor] = True  # the fault: `<` became `<=`

    altered_TC = inputs.features_TC.clone()
    altered_TC[anchor:] += 1.0  # every position from the anchor on knows the answer
    outputs = []
    for features_TC in (inputs.features_TC, altered_TC):
        with torch.no_grad():
            hidden_QD = loss.layers(
                features_TC,
                inputs.positions_T,
                ids_Q=prepared.ids_Q,
                positions_Q=prepared.positions_Q,
                mask=loss.attention_mask(prepared, num_context=CONTEXT),
            )
        outputs.append(hidden_QD)
    return float((outputs[0] - outputs[1]).abs().max())


MODE = FailureMode(
    slug="future-leak",
    measures="movement of the drafter's output when the features of its own answer are altered",
    unit="1 (activation units)",
    limit=0.0,
    reproduce=reproduce,
    remedy=context_mask,
    detect=accepted_in_training_alone,
)
