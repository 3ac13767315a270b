import statistics
from collections import Counter

import oracles
import pytest
import torch
from drafter_cases import packed, step_inputs
from torch import Tensor

from dflash.drafter.anchors import Anchors, anchor_scores, draw_anchors

CPU = torch.device("cpu")


def scores(seed: int, batch_number: int | Tensor, num_positions: int) -> Tensor:
    return anchor_scores(seed, batch_number, num_positions=num_positions, device=CPU)


def drawn(
    lengths: list[int],
    *,
    token_budget: int,
    num_anchors: int,
    supervised_share: float = 1.0,
    seed: int = 0,
) -> tuple[Anchors, Tensor, list[int]]:
    """Return anchors, their scores and, by oracle, the valid positions."""
    inputs = step_inputs(
        lengths, token_budget=token_budget, supervised_share=supervised_share, seed=seed
    )
    scores_T = scores(seed, 5, token_budget)
    anchors = draw_anchors(
        inputs.loss_mask_T,
        inputs.documents_T,
        inputs.positions_T,
        scores_T=scores_T,
        num_anchors=num_anchors,
    )
    valid = oracles.valid_anchors(inputs.loss_mask_T.tolist(), inputs.documents_T.tolist())
    return anchors, scores_T, valid


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11, -7])
@pytest.mark.parametrize("batch_number", [0, 1, 123_456_789_012])
def test_scores_are_those_of_splitmix64_in_unbounded_integers(seed: int, batch_number: int) -> None:
    expected = [oracles.anchor_score(seed, batch_number, row) for row in range(50)]
    assert scores(seed, batch_number, 50).tolist() == expected


def test_scores_never_change_between_versions() -> None:
    # A run resumed by a later version must draw the anchors that it would have drawn.
    assert [round(score * 2**24) for score in scores(0, 0, 4).tolist()] == PINNED


PINNED = [2327157, 16292389, 4661262, 15143132]


def test_scores_are_the_same_for_an_integer_and_a_device_tensor() -> None:
    assert torch.equal(scores(3, 17, 1000), scores(3, torch.tensor(17), 1000))


def test_scores_are_uniform() -> None:
    many = torch.cat([scores(1, number, 4096) for number in range(25)])
    assert many.min() >= 0
    assert many.max() < 1
    counts = torch.histc(many, bins=64, min=0, max=1)
    expected = len(many) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 103.4  # 63 degrees of freedom, p = 0.001


def test_scores_of_different_batches_seeds_and_neighbours_are_unrelated() -> None:
    base = scores(0, 0, 20_000).tolist()
    for other in (scores(0, 1, 20_000), scores(1, 0, 20_000), scores(0, 0, 20_001)[1:]):
        # 20,000 independent pairs: the correlation's standard deviation is 0.007.
        assert abs(statistics.correlation(base, other.tolist())) < 0.03


@pytest.mark.parametrize("supervised_share", [1.0, 0.8, 0.4])
@pytest.mark.parametrize("lengths", [[60], [20, 3, 1, 2, 30], [1] * 10, [2, 2, 2]])
def test_anchors_are_the_best_scored_valid_positions(
    lengths: list[int], supervised_share: float
) -> None:
    for seed in range(5):
        anchors, scores_T, valid = drawn(
            lengths,
            token_budget=64,
            num_anchors=12,
            supervised_share=supervised_share,
            seed=seed,
        )
        best = sorted(sorted(valid, key=lambda row: -float(scores_T[row]))[:12])
        assert anchors.anchors_N[anchors.used_N].tolist() == best
        assert anchors.used_N.tolist() == [True] * len(best) + [False] * (12 - len(best))


def test_unused_anchors_repeat_the_last_used_one() -> None:
    anchors, _, valid = drawn([4, 5], token_budget=16, num_anchors=10)
    assert valid == [1, 2, 5, 6, 7]
    assert anchors.anchors_N.tolist() == [*valid, 7, 7, 7, 7, 7]


def test_a_batch_without_a_valid_position_has_no_used_anchor() -> None:
    anchors, _, valid = drawn([1, 1, 1], token_budget=16, num_anchors=4)
    assert valid == []
    assert anchors.anchors_N.tolist() == [0, 0, 0, 0]
    assert not anchors.used_N.any()


def test_more_anchors_than_positions_leave_the_rest_unused() -> None:
    anchors, _, valid = drawn([16], token_budget=16, num_anchors=40)
    assert anchors.used_N.sum() == len(valid) == 14
    assert anchors.anchors_N.shape == (40,)


def test_equal_scores_fall_back_to_the_row_so_that_devices_agree() -> None:
    documents_T, positions_T = packed([20], token_budget=20)
    anchors = draw_anchors(
        torch.ones(20, dtype=torch.bool),
        documents_T,
        positions_T,
        scores_T=torch.full((20,), 0.5),
        num_anchors=3,
    )
    assert anchors.anchors_N.tolist() == [16, 17, 18]


def test_every_valid_position_is_drawn_equally_often() -> None:
    documents_T, positions_T = packed([22], token_budget=24)
    counts: Counter[int] = Counter()
    for number in range(3000):
        anchors = draw_anchors(
            documents_T >= 0,
            documents_T,
            positions_T,
            scores_T=scores(0, number, 24),
            num_anchors=5,
        )
        counts.update(anchors.anchors_N.tolist())
    assert sorted(counts) == list(range(1, 21))
    expected = 3000 * 5 / 20
    # Drawn without replacement, so a little below chi-square with 19 degrees; p = 0.001 at 43.8.
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 43.8


def test_the_longest_batch_draws_exactly_its_best_positions() -> None:
    # T = 49,152 and N = 8,192: any 32-bit key or index would overflow here.
    token_budget, num_anchors = 49_152, 8_192
    documents_T, positions_T = packed([30_000, 19_000], token_budget=token_budget)
    scores_T = scores(0, 9, token_budget)
    anchors = draw_anchors(
        documents_T >= 0, documents_T, positions_T, scores_T=scores_T, num_anchors=num_anchors
    )
    valid = [*range(1, 29_999), *range(30_001, 48_999)]
    ranked = sorted(valid, key=lambda row: (float(scores_T[row]), row), reverse=True)
    assert anchors.anchors_N.tolist() == sorted(ranked[:num_anchors])
