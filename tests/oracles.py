"""Slow, independent truths, written as loops from the papers; nothing of dflash is imported.

Lists stand for tensors: ``documents[t]`` is the document of position t (-1 for padding),
``loss_mask[t]`` says whether position t is supervised.
"""

import math

import torch
from torch import Tensor

WORD = 2**64


def splitmix(state: int) -> int:
    """The finaliser of splitmix64 (OOPSLA 2014) in unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


def anchor_score(seed: int, batch_number: int, position: int) -> float:
    """The score of one position: two rounds of keying, then a counter; its top 24 bits."""
    golden = 0x9E3779B97F4A7C15
    key = splitmix((splitmix((seed + golden) % WORD) + golden * (batch_number + 1)) % WORD)
    return (splitmix((key + golden * (position + 1)) % WORD) >> 40) / 2**24


def valid_anchors(loss_mask: list[bool], documents: list[int]) -> list[int]:
    """Positions that may be anchors: supervised, so is the next of the same document, not first."""
    valid = []
    for row in range(1, len(documents) - 1):
        first_of_document = documents[row - 1] != documents[row]
        same_document = documents[row] == documents[row + 1]
        supervised = loss_mask[row] and loss_mask[row + 1]
        if supervised and same_document and not first_of_document:
            valid.append(row)
    return valid


def may_read(
    anchors: list[int], used: list[bool], documents: list[int], *, block_size: int
) -> Tensor:
    """Return bool [Q, S]: spec section 2.3, one pair at a time."""
    num_context, num_slots = len(documents), len(anchors) * block_size
    mask = torch.zeros(num_slots, num_context + num_slots, dtype=torch.bool)
    for slot in range(num_slots):
        block = slot // block_size
        anchor = anchors[block]
        for row in range(num_context):
            if used[block] and row < anchor and documents[row] == documents[anchor]:
                mask[slot, row] = True
        for other in range(num_slots):
            if other // block_size == block:
                mask[slot, num_context + other] = True
    return mask


def labels_and_weights(
    anchors: list[int],
    used: list[bool],
    documents: list[int],
    *,
    tokens: list[int],
    loss_mask: list[bool],
    block_size: int,
) -> tuple[list[list[int | None]], list[list[bool]]]:
    """Labels (None past the batch) and supervision, cut at the first slot that is not open."""
    labels: list[list[int | None]] = []
    weights = []
    for anchor, is_used in zip(anchors, used, strict=True):
        block_labels: list[int | None] = []
        block_weights = []
        is_open = is_used
        for slot in range(block_size):
            row = anchor + slot
            inside = row < len(tokens)
            block_labels.append(tokens[row] if inside else None)
            is_open = is_open and inside and documents[row] == documents[anchor] and loss_mask[row]
            block_weights.append(slot > 0 and is_open)
        labels.append(block_labels)
        weights.append(block_weights)
    return labels, weights


def decay_weights(supervised: list[bool], gamma: float | None) -> list[float]:
    """Paper equation 4: exp(-(k - 1) / gamma) for slots k = 1 to B - 1; slot 0 is supervised[0]."""
    return [
        (1.0 if gamma is None else math.exp(-(slot - 1) / gamma)) if is_supervised else 0.0
        for slot, is_supervised in enumerate(supervised)
    ]


def dpace_weights(ce: list[float], supervised: list[bool], alpha: float) -> list[float]:
    """arXiv 2605.18810: w_j is the sum over supervised i >= j of the product up to i."""
    prefix, product = [], 1.0
    for slot in range(len(ce)):
        if supervised[slot]:
            product *= (1 - alpha) * math.exp(-ce[slot]) + alpha
        prefix.append(product)
    weights = []
    for slot in range(len(ce)):
        reached = sum(prefix[i] for i in range(slot, len(ce)) if supervised[i])
        weights.append(reached if supervised[slot] else 0.0)
    return weights


def accepted_length(correct: list[bool], supervised: list[bool]) -> int:
    """Tokens that one verify step commits: leading right slots (from slot 1) and the bonus."""
    length = 1
    for slot in range(1, len(correct)):
        if not (correct[slot] and supervised[slot]):
            break
        length += 1
    return length


def full_logits_loss(
    hidden_QD: Tensor,
    head_VD: Tensor,
    labels_NB: Tensor,
    *,
    weight_NB: Tensor,
    gamma: float | None,
    dpace_alpha: float | None,
) -> tuple[Tensor, float]:
    """Sum of weight times cross-entropy over full logits (for autograd), and the sum of weights.

    ``dpace_alpha`` None means decay with ``gamma``.
    """
    ce_NB = torch.nn.functional.cross_entropy(
        hidden_QD @ head_VD.T, labels_NB.flatten().clamp(min=0), reduction="none"
    ).view(labels_NB.shape)
    loss, total = hidden_QD.new_zeros(()), 0.0
    for block in range(len(labels_NB)):
        supervised = weight_NB[block].tolist()
        weights = (
            decay_weights(supervised, gamma)
            if dpace_alpha is None
            else dpace_weights(ce_NB[block].tolist(), supervised, dpace_alpha)
        )
        for slot, weight in enumerate(weights):
            loss = loss + weight * ce_NB[block, slot]
            total += weight
    return loss, total
