"""A slot is trained on the token after its own.

Symptom
    No message. Training accuracy and training's own accepted length are excellent, decoding
    accepts next to nothing. (Reported: acceptance 1.02 to 1.29 in serving, good training accuracy.)
Mechanism
    An autoregressive head learns at position p the token at p + 1. A DFlash slot does not: slot k
    stands at position a + k and is filled in place, so its label is token a + k. With the habit of
    shifting, slot k learns token a + k + 1, and decoding compares it with token a + k.
Reproduce
    A drafter that has learnt its labels perfectly: its output is each label's own row of the head.
    The production objective says how many tokens a block would commit; decoding's side compares
    every slot with the token at the slot's own position.
Remedy
    ``dflash.drafter.blocks.block_labels``: the label is the token at anchor + k, unshifted.
Verify
    Training reports exactly as many tokens per block as decoding commits: the difference is 0.0.
    Shifted, decoding commits the bonus token alone.
Versions
    Any torch: the mistake is in the program. Seen on a CPU with every version this page's test
    runs on.
Sources
    https://github.com/sgl-project/SpecForge/issues/455 (the reported numbers)
    https://github.com/sgl-project/SpecForge/pull/473 (the fix, with two more)
    Drafters that mean it (DSpark, Domino's shift_label, speculators' sample_from_anchor) are
    another layout, which z-lab's decoding does not read.
"""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from dflash.diagnose.acceptance import accepted_in_training_alone
from dflash.drafter.acceptance import accepted_lengths
from dflash.drafter.blocks import block_labels
from dflash.drafter.objective import ObjectiveSettings, block_objective
from dflash.failures._example import packed_batch, small_loss
from dflash.failures._mode import FailureMode

CONTEXT, NUM_ANCHORS = 60, 4


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the tokens per block that training reports and decoding does not commit."""
    loss = small_loss(num_anchors=NUM_ANCHORS, seed=seed)
    # Every token differs from its neighbour, so that a shifted label cannot be right by chance.
    inputs = packed_batch([CONTEXT], seed=seed)._replace(tokens_T=torch.arange(CONTEXT))
    truth_T = inputs.tokens_T
    if faulty:
        inputs = inputs._replace(tokens_T=truth_T.roll(-1))  # the fault: learn the next token
    prepared = loss.prepare(inputs)

    vocabulary = torch.eye(CONTEXT)
    learnt_QD = F.one_hot(prepared.labels_NB, CONTEXT).float().flatten(0, 1)
    reported = block_objective(
        learnt_QD,
        vocabulary,
        prepared.labels_NB,
        weight_NB=prepared.weight_NB,
        settings=ObjectiveSettings(),
        with_metrics=True,
    )
    drafted_NB = learnt_QD.argmax(dim=1).view_as(prepared.labels_NB)
    stands_at_NB = prepared.positions_Q.view_as(drafted_NB).clamp(max=CONTEXT - 1)
    committed_N = accepted_lengths(drafted_NB == truth_T[stands_at_NB], prepared.weight_NB)
    assert reported.accepted_tokens is not None
    return float(reported.accepted_tokens - committed_N.sum()) / NUM_ANCHORS


MODE = FailureMode(
    slug="label-shift",
    measures="what training reports and decoding does not commit, for a drafter that knows all",
    unit="tokens per block",
    limit=0.0,
    reproduce=reproduce,
    remedy=block_labels,
    detect=accepted_in_training_alone,
)
