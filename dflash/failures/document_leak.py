"""A block reads, or must predict, the document packed next to its own.

Symptom
    No message. Loss is a little too high and never explained: some slots are asked for the opening
    of a stranger's document, which nobody could predict, and others read one.
Mechanism
    Packed documents lie end to end. A block near the end of one runs over into the next; if labels
    know the loss mask but not the document, its last slots are supervised on the neighbour's
    tokens. If attention does not know it either, every block also reads all earlier documents, and
    decoding never has those.
Reproduce
    Every document is one token of its own, repeated, so that whatever a block reads or must
    predict tells where it is from. Prepare the batch with the production step; the fault takes the
    document ids away. Count what is from elsewhere.
Remedy
    ``dflash.drafter.blocks.block_labels`` ends supervision at the document's end, and
    ``dflash.drafter.masks.context_mask`` admits the anchor's document alone.
Verify
    The count is exactly 0.
Versions
    Any torch: the mistake is in the program. Seen on a CPU with every version this page's test
    runs on.
Sources
    speculators models/dflash/core.py:425 masks documents in attention but not in the labels:
    ``loss_mask[:, anchored_block_indices]``.
    AutoModel datasets/llm/eagle3.py:57 handles it (doc_remaining); SpecForge and Model-Optimizer
    put one document in a row.
"""

import torch
from torch import Tensor

from dflash.drafter.blocks import block_labels
from dflash.failures._example import packed_batch, small_loss
from dflash.failures._mode import FailureMode

LENGTHS, NUM_ANCHORS = [20, 13, 27], 40


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many context rows and labels belong to another document than their block."""
    loss = small_loss(num_anchors=NUM_ANCHORS, seed=seed)
    inputs = packed_batch(LENGTHS, seed=seed)
    origin_T = inputs.documents_T
    inputs = inputs._replace(tokens_T=origin_T)  # each document repeats its own number
    if faulty:
        inputs = inputs._replace(documents_T=torch.zeros_like(origin_T))  # the fault: one document
    prepared = loss.prepare(inputs)

    origin_N1 = prepared.ids_Q.view_as(prepared.labels_NB)[:, :1]  # the anchor's token
    assert isinstance(prepared.mask, Tensor)
    foreign_NT = prepared.mask & (origin_T != origin_N1)
    foreign_NB = prepared.weight_NB & (prepared.labels_NB != origin_N1)
    return float(foreign_NT.sum() + foreign_NB.sum())


MODE = FailureMode(
    slug="document-leak",
    measures="context rows and supervised labels of another document than their block's",
    unit="rows and labels",
    limit=0.0,
    reproduce=reproduce,
    remedy=block_labels,
)
