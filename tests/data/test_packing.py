"""Batches by number: nothing lost, nothing twice, nearly full, the same every time."""

import numpy as np
import pytest

from dflash.data.packing import MIN_PIECE_TOKENS, Packing, best_fit
from dflash.data.shuffle import random_order
from dflash.data.stdlib import stdlib_files
from dflash.errors import DataError


def lengths_like(kind: str, count: int) -> np.ndarray:
    draw = np.random.default_rng(7)
    if kind == "lognormal":
        return np.clip(draw.lognormal(5.5, 1.0, count), 3, 4096).astype(np.int64)
    return draw.integers(3, 4096, count)


def best_fit_by_looking_at_every_bin(lengths: list[int], budget: int) -> list[int]:
    gaps: list[int] = []
    sizes = []
    for length in lengths:
        fitting = [gap for gap in gaps if gap >= length]
        if not fitting:
            gaps.append(budget)
            fitting = [budget]
        gap = min(fitting)
        gaps[gaps.index(gap)] -= length
        sizes.append(gap)
    return sizes


@pytest.mark.parametrize("budget", [63, 64, 65, 200, 1000])
def test_each_length_goes_to_the_fullest_bin_that_it_fits(budget: int) -> None:
    lengths = np.random.default_rng(budget).integers(1, budget + 1, 300).tolist()
    used: dict[int, int] = {}
    gaps_met = []
    for length, number in zip(lengths, best_fit(lengths, budget), strict=True):
        gaps_met.append(budget - used.get(number, 0))
        used[number] = used.get(number, 0) + length
    assert gaps_met == best_fit_by_looking_at_every_bin(lengths, budget)


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
def test_an_epoch_holds_every_token_of_every_row_once(kind: str) -> None:
    lengths = lengths_like(kind, 500)
    packing = Packing(lengths, token_budget=2048, seed=1, max_document_tokens=1000)
    met = [np.zeros(length, dtype=int) for length in lengths]
    for number in range(packing.batches_per_epoch(0)):
        pieces = packing.plan(number)
        assert sum(piece.stop - piece.start for piece in pieces) <= 2048
        for piece in pieces:
            assert piece.stop - piece.start <= 1000
            met[piece.row][piece.start : piece.stop] += 1
    lost = sum(int((count == 0).sum()) for count in met)
    assert max(count.max() for count in met) == 1
    assert lost == sum(length % 1000 for length in lengths if length % 1000 < MIN_PIECE_TOKENS)


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
def test_batches_are_at_least_97_percent_full(kind: str) -> None:
    packing = Packing(lengths_like(kind, 5000), token_budget=4096, seed=0)
    assert packing.fill(0) >= 0.97


def test_a_batch_is_known_by_its_number_alone() -> None:
    lengths = lengths_like("lognormal", 300)
    first = Packing(lengths, token_budget=1024, seed=3)
    total = sum(first.batches_per_epoch(epoch) for epoch in range(3))
    walked = [first.plan(number) for number in range(total)]
    for number in (total - 1, 0, total // 2):
        assert Packing(lengths, token_budget=1024, seed=3).plan(number) == walked[number]


def test_epochs_and_seeds_differ_in_order() -> None:
    lengths = lengths_like("lognormal", 300)
    packing = Packing(lengths, token_budget=1024, seed=3)
    second = packing.first_batch(1)
    assert packing.epoch_of(second - 1) == 0
    assert packing.epoch_of(second) == 1
    assert packing.plan(0) != packing.plan(second)
    assert packing.plan(0) != Packing(lengths, token_budget=1024, seed=4).plan(0)


def test_batches_are_not_sorted_by_length() -> None:
    packing = Packing(lengths_like("lognormal", 5000), token_budget=4096, seed=0)
    longest = [
        max(piece.stop - piece.start for piece in packing.plan(number))
        for number in range(packing.batches_per_epoch(0))
    ]
    place = np.arange(len(longest))
    assert abs(np.corrcoef(place, longest)[0, 1]) < 0.15


def test_rows_that_can_teach_nothing_are_refused_when_there_is_nothing_else() -> None:
    with pytest.raises(DataError, match="no row to pack"):
        Packing(np.array([2, 1]), token_budget=8, seed=0)


def splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (1, 2), (2**63, -1)])
def test_a_random_order_sorts_by_a_hash_of_plain_integers(seed: int, stream: int) -> None:
    key = splitmix64(splitmix64(seed) ^ (stream % 2**64))
    scores = [splitmix64(key ^ splitmix64(number)) for number in range(100)]
    by_hand = sorted(range(100), key=scores.__getitem__)
    assert random_order(100, seed=seed, stream=stream).tolist() == by_hand


@pytest.mark.parametrize("limit", [512, 1024, 2048])
def test_the_quickstart_text_fills_batches_to_97_percent(limit: int) -> None:
    """The shipped target's tokens are bytes, so file sizes are the lengths before splitting."""
    sizes = [path.stat().st_size for path in stdlib_files("train")]
    packing = Packing(
        np.array(sizes, dtype=np.int64), token_budget=2048, seed=0, max_document_tokens=limit
    )
    assert packing.fill(0) >= 0.97
