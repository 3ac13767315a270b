"""Acceptance is computed from each slot's own accuracy, not from the blocks it came in.

Symptom
    No message. The reported accepted length is not the one that decoding gives, in either
    direction, and the checkpoint that looks best is not the best one.
Mechanism
    A block commits its unbroken prefix of right slots: 1 + sum over k of P(slots 1..k all right).
    The product of marginal accuracies, 1 + sum over k of prod over i <= k of P(slot i right), is
    the same only if slots are right independently of each other. They are not: an easy block is
    right all through and a hard one wrong from the start.
Reproduce
    Every second block is easy, all its slots right; the others have none. The production objective
    sums both what is right by slot and what each block would commit. The fault multiplies the
    marginals. Compared with counting each block's tokens one by one until the first wrong one.
Remedy
    ``dflash.drafter.acceptance.accepted_lengths``: the prefix of each block, then the mean.
Verify
    The difference from counting is exactly 0.0 tokens (all numbers here are powers of two over
    small integers, so nothing is rounded).
Versions
    Any torch: the mistake is in the metric. Seen on a CPU with every version this page's test
    runs on.
Sources
    speculators models/dflash/metrics.py:97-106: ``eal``, the sum of products of marginal
    accuracies (and no bonus token).
    SpecForge eval/evaluator.py:159-164: for DFlash ``eval/simulated_acc_len`` is the mean token
    accuracy; training/checkpoint.py:42 keeps the best checkpoint by it.
    AutoModel dflash/core.py:122-141: true prefixes, but an unsupervised slot does not end one.
    https://github.com/vllm-project/vllm/issues/42508 (the metric differs between two programs)
"""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from dflash.drafter.acceptance import accepted_lengths
from dflash.drafter.objective import ObjectiveSettings, block_objective
from dflash.failures._mode import FailureMode

NUM_BLOCKS, BLOCK_SIZE, VOCABULARY = 16, 8, 32


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return |reported accepted length - counted|, in tokens per block."""
    random = torch.Generator().manual_seed(seed)
    labels_NB = torch.randint(VOCABULARY, (NUM_BLOCKS, BLOCK_SIZE), generator=random)
    easy_N1 = (torch.arange(NUM_BLOCKS) % 2 == 0)[:, None]
    drafted_NB = torch.where(easy_N1, labels_NB, (labels_NB + 1) % VOCABULARY)
    weight_NB = torch.ones_like(labels_NB, dtype=torch.bool)
    weight_NB[:, 0] = False
    found = block_objective(
        F.one_hot(drafted_NB, VOCABULARY).float().flatten(0, 1),
        torch.eye(VOCABULARY),
        labels_NB,
        weight_NB=weight_NB,
        settings=ObjectiveSettings(),
        with_metrics=True,
    )
    assert found.correct_B is not None
    assert found.supervised_B is not None
    assert found.accepted_tokens is not None
    assert found.accepted_blocks is not None
    reported = float(found.accepted_tokens / found.accepted_blocks)
    if faulty:
        marginal = found.correct_B[1:] / found.supervised_B[1:]
        reported = float(1.0 + marginal.cumprod(dim=0).sum())  # the fault: slots as independent
    return abs(reported - _counted(drafted_NB.tolist(), labels_NB.tolist()))


def _counted(drafted: list[list[int]], wanted: list[list[int]]) -> float:
    tokens = 0
    for slots, labels in zip(drafted, wanted, strict=True):
        tokens += 1  # the bonus token
        for slot, label in zip(slots[1:], labels[1:], strict=True):
            if slot != label:
                break
            tokens += 1
    return tokens / len(wanted)


MODE = FailureMode(
    slug="marginal-acceptance",
    measures="distance of the reported accepted length from one counted block by block",
    unit="tokens per block",
    limit=0.0,
    reproduce=reproduce,
    remedy=accepted_lengths,
)
