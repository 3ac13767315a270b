from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

from dflash.drafter.objective import (
    ChunkLoss,
    ObjectiveSettings,
    block_objective,
    chunk_loss,
)
from dflash.errors import ConfigError

BLOCKS, BLOCK, WIDTH, VOCAB = 12, 6, 24, 97
KINDS: dict[str, dict[str, Any]] = {
    "decay 4": {"gamma": 4.0},
    "decay 7": {"gamma": 7.0},
    "no decay": {"gamma": None},
    "D-PACE 0.5": {"kind": "dpace", "dpace_alpha": 0.5},
    "D-PACE 0": {"kind": "dpace", "dpace_alpha": 0.0},
}


def drawn(*, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden_QD, lm_head_VD, labels_NB and weight_NB, cut at random slots; two all False."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS * BLOCK, WIDTH, generator=random) * spread
    head = torch.randn(VOCAB, WIDTH, generator=random) * 0.5
    labels = torch.randint(VOCAB, (BLOCKS, BLOCK), generator=random)
    cut = torch.randint(1, BLOCK + 1, (BLOCKS, 1), generator=random)
    cut[3:5] = 0
    slot = torch.arange(BLOCK)
    return hidden, head, labels, (slot > 0) & (slot < cut)


def oracle_loss(kind: dict[str, Any], tensors: tuple[Tensor, ...]) -> tuple[Tensor, float, Tensor]:
    """Return loss sum, weight sum and d loss / d hidden by plain autograd over full logits."""
    hidden, head, labels, weight = tensors
    leaf = hidden.float().requires_grad_()
    loss, total = oracles.full_logits_loss(
        leaf,
        head.float(),
        labels,
        weight_NB=weight,
        gamma=kind.get("gamma"),
        dpace_alpha=kind.get("dpace_alpha"),
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), total, gradient


@pytest.mark.parametrize("chunk_blocks", [1, 4, 5, 12, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_autograd_over_full_logits(
    kind: str, chunk_blocks: int
) -> None:
    hidden, head, labels, weight = drawn()
    expected_loss, expected_total, expected_gradient = oracle_loss(
        KINDS[kind], (hidden, head, labels, weight)
    )
    leaf = hidden.requires_grad_()
    objective = block_objective(
        leaf,
        head,
        labels,
        weight_NB=weight,
        settings=ObjectiveSettings(chunk_blocks=chunk_blocks, **KINDS[kind]),
        with_metrics=False,
    )
    (objective.loss_sum * 3).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(objective.loss_sum.detach(), expected_loss)
    torch.testing.assert_close(float(objective.weight_sum), expected_total, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad, 3 * expected_gradient, rtol=1e-4, atol=1e-6)
    assert objective.supervised_slots == weight.sum()
    assert objective.correct_B is None


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_keeps_loss_and_gradient_within_its_rounding(kind: str) -> None:
    tensors = drawn(seed=1)
    hidden, head = (tensor.bfloat16() for tensor in tensors[:2])
    expected_loss, _, expected_gradient = oracle_loss(KINDS[kind], (hidden, head, *tensors[2:]))
    leaf = hidden.requires_grad_()
    objective = block_objective(
        leaf,
        head,
        tensors[2],
        weight_NB=tensors[3],
        settings=ObjectiveSettings(chunk_blocks=5, **KINDS[kind]),
        with_metrics=False,
    )
    objective.loss_sum.backward()
    assert leaf.grad is not None
    assert objective.loss_sum.dtype == torch.float32
    # bf16 logits carry 8 bits; D-PACE also weighs by them.
    torch.testing.assert_close(objective.loss_sum.detach(), expected_loss, rtol=5e-3, atol=0)
    error = (leaf.grad.float() - expected_gradient).norm() / expected_gradient.norm()
    assert error < 0.02


def test_the_gradient_of_an_unsupervised_slot_is_exactly_zero() -> None:
    hidden, head, labels, weight = drawn()
    leaf = hidden.requires_grad_()
    block_objective(
        leaf, head, labels, weight_NB=weight, settings=ObjectiveSettings(), with_metrics=False
    ).loss_sum.backward()
    assert leaf.grad is not None
    moved = (leaf.grad.view(BLOCKS, BLOCK, WIDTH) != 0).any(dim=-1)
    assert torch.equal(moved, weight)


def test_a_batch_without_supervision_has_loss_zero_and_gradient_zero() -> None:
    hidden, head, labels, weight = drawn()
    leaf = hidden.requires_grad_()
    objective = block_objective(
        leaf,
        head,
        labels,
        weight_NB=torch.zeros_like(weight),
        settings=ObjectiveSettings(),
        with_metrics=True,
    )
    objective.loss_sum.backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()
    assert [objective.loss_sum.item(), objective.weight_sum.item()] == [0.0, 0.0]
    assert [int(objective.supervised_slots), int(objective.accepted_blocks or 0)] == [0, 0]


@pytest.mark.parametrize("chunk_blocks", [3, 5, 12])
def test_slot_0_never_reaches_the_head(chunk_blocks: int) -> None:
    hidden, head, labels, weight = drawn()
    seen: list[Tensor] = []

    def spy(rows_RD: Tensor, *args: Tensor, **named: Any) -> ChunkLoss:  # noqa: ANN401
        seen.append(rows_RD)
        return chunk_loss(rows_RD, *args, **named)

    block_objective(
        hidden,
        head,
        labels,
        weight_NB=weight,
        settings=ObjectiveSettings(chunk_blocks=chunk_blocks),
        with_metrics=True,
        chunk=spy,
    )
    expected = hidden.view(BLOCKS, BLOCK, WIDTH)[:, 1:].reshape(-1, WIDTH)
    assert max(len(rows) for rows in seen) == chunk_blocks * (BLOCK - 1)
    assert torch.equal(torch.cat(seen), expected)


def test_nothing_of_vocabulary_width_is_kept_for_the_backward_pass() -> None:
    hidden, head, labels, weight = drawn()
    kept: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block_objective(
            hidden.requires_grad_(),
            head,
            labels,
            weight_NB=weight,
            settings=ObjectiveSettings(),
            with_metrics=True,
        )
    assert kept == [torch.Size([BLOCKS * (BLOCK - 1), WIDTH])]


def test_metrics_count_right_slots_and_true_prefixes() -> None:
    hidden, head, labels, weight = drawn(seed=2)
    best = (hidden @ head.T).argmax(-1).view(BLOCKS, BLOCK)
    right = torch.rand(BLOCKS, BLOCK, generator=torch.Generator().manual_seed(3)) < 0.6
    labels = torch.where(right, best, (best + 1) % VOCAB)
    objective = block_objective(
        hidden,
        head,
        labels,
        weight_NB=weight,
        settings=ObjectiveSettings(chunk_blocks=5),
        with_metrics=True,
    )
    counted = [block for block in range(BLOCKS) if any(weight[block].tolist())]
    lengths = [
        oracles.accepted_length(right[block].tolist(), weight[block].tolist()) for block in counted
    ]
    assert objective.correct_B is not None
    assert objective.supervised_B is not None
    assert objective.correct_B.tolist() == (right & weight).sum(0).tolist()
    assert objective.supervised_B.tolist() == weight.sum(0).tolist()
    assert objective.accepted_tokens == sum(lengths)
    assert objective.accepted_blocks == len(counted)
    assert len(counted) < BLOCKS


def test_metrics_do_not_change_the_loss() -> None:
    hidden, head, labels, weight = drawn()
    plain, measured = (
        block_objective(
            hidden,
            head,
            labels,
            weight_NB=weight,
            settings=ObjectiveSettings(),
            with_metrics=with_metrics,
        )
        for with_metrics in (False, True)
    )
    assert torch.equal(plain.loss_sum, measured.loss_sum)
    assert torch.equal(plain.weight_sum, measured.weight_sum)


def test_a_large_logit_does_not_overflow() -> None:
    hidden, head, labels, weight = drawn(spread=1000.0)
    leaf = hidden.requires_grad_()
    loss = block_objective(
        leaf, head, labels, weight_NB=weight, settings=ObjectiveSettings(), with_metrics=False
    ).loss_sum
    loss.backward()
    assert leaf.grad is not None
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "focal"}, 'objective.kind must be "decay" or "dpace"'),
        ({"gamma": 0.0}, "objective.gamma must be positive"),
        ({"gamma": float("nan")}, "objective.gamma must be positive"),
        ({"dpace_alpha": 1.5}, "objective.dpace_alpha must lie in"),
        ({"chunk_blocks": 0}, "chunk_blocks must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectiveSettings(**settings)
