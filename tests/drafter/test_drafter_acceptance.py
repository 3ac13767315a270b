import oracles
import torch

from dflash.drafter.acceptance import accepted_lengths


def test_the_accepted_length_is_the_true_prefix_of_each_block() -> None:
    random = torch.Generator().manual_seed(0)
    correct = torch.rand(300, 9, generator=random) < 0.7
    supervised = torch.rand(300, 9, generator=random) < 0.9
    expected = [
        oracles.accepted_length(right, used)
        for right, used in zip(correct.tolist(), supervised.tolist(), strict=True)
    ]
    assert accepted_lengths(correct, supervised).tolist() == expected
    assert set(expected) == set(range(1, 10))


def test_one_wrong_slot_ends_the_prefix_whatever_follows() -> None:
    correct = torch.tensor([[False, True, False, True], [True, False, True, True]])
    everything = torch.ones(2, 4, dtype=torch.bool)
    assert accepted_lengths(correct, everything).tolist() == [2, 1]


def test_an_unsupervised_slot_ends_the_prefix() -> None:
    correct = torch.ones(1, 4, dtype=torch.bool)
    supervised = torch.tensor([[False, True, False, True]])
    assert accepted_lengths(correct, supervised).tolist() == [2]
