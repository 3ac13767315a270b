import oracles
import pytest
import torch
from drafter_cases import step_inputs

from dflash.drafter.anchors import Anchors
from dflash.drafter.blocks import block_inputs, block_labels

BLOCK, BUDGET = 5, 40


def some_anchors(*, num_anchors: int, last: int, seed: int) -> Anchors:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(last + 1, (num_anchors,), generator=random).sort().values
    used = torch.arange(num_anchors) < num_anchors - 2
    return Anchors(torch.where(used, rows, rows[-3]), used)


@pytest.mark.parametrize("lengths", [[40], [13, 20], [3] * 13, [39]])
@pytest.mark.parametrize("supervised_share", [1.0, 0.7])
def test_labels_stop_at_the_document_end_the_batch_end_and_the_first_hole(
    lengths: list[int], supervised_share: float
) -> None:
    for seed in range(10):
        inputs = step_inputs(
            lengths, token_budget=BUDGET, supervised_share=supervised_share, seed=seed
        )
        anchors = some_anchors(num_anchors=9, last=BUDGET - 1, seed=seed)
        labels, weights = block_labels(
            anchors,
            inputs.tokens_T,
            inputs.documents_T,
            loss_mask_T=inputs.loss_mask_T,
            block_size=BLOCK,
        )
        expected_labels, expected_weights = oracles.labels_and_weights(
            anchors.anchors_N.tolist(),
            anchors.used_N.tolist(),
            inputs.documents_T.tolist(),
            tokens=inputs.tokens_T.tolist(),
            loss_mask=inputs.loss_mask_T.tolist(),
            block_size=BLOCK,
        )
        assert weights.tolist() == expected_weights
        for found, expected in zip(labels.tolist(), expected_labels, strict=True):
            assert [f for f, e in zip(found, expected, strict=True) if e is not None] == [
                e for e in expected if e is not None
            ]


def test_a_slot_after_a_hole_is_not_supervised() -> None:
    loss_mask_T = torch.tensor([True, True, True, False, True, True, True, True])
    _, weights = block_labels(
        Anchors(torch.tensor([1]), torch.tensor([True])),
        torch.arange(8),
        torch.zeros(8, dtype=torch.int64),
        loss_mask_T=loss_mask_T,
        block_size=BLOCK,
    )
    assert weights.tolist() == [[False, True, False, False, False]]


def test_slot_k_predicts_the_token_at_anchor_plus_k() -> None:
    tokens_T = torch.arange(100, 120)
    labels, _ = block_labels(
        Anchors(torch.tensor([3]), torch.tensor([True])),
        tokens_T,
        torch.zeros(20, dtype=torch.int64),
        loss_mask_T=torch.ones(20, dtype=torch.bool),
        block_size=BLOCK,
    )
    assert labels.tolist() == [[103, 104, 105, 106, 107]]


def test_a_block_holds_its_anchor_then_masks_at_in_document_positions() -> None:
    inputs = step_inputs([10, 20], token_budget=BUDGET)
    anchors = Anchors(torch.tensor([4, 12, 12]), torch.tensor([True, True, False]))
    ids_Q, positions_Q = block_inputs(
        anchors, inputs.tokens_T, inputs.positions_T, block_size=BLOCK, mask_token_id=60
    )
    tokens = inputs.tokens_T.tolist()
    assert ids_Q.view(3, BLOCK).tolist() == [
        [tokens[4], 60, 60, 60, 60],
        [tokens[12], 60, 60, 60, 60],
        [60] * BLOCK,
    ]
    assert positions_Q.view(3, BLOCK).tolist() == [
        [4, 5, 6, 7, 8],
        [2, 3, 4, 5, 6],
        [2, 3, 4, 5, 6],
    ]
