import math
from typing import cast

import oracles
import pytest
import torch
from drafter_cases import packed
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.drafter.anchors import Anchors, anchor_scores, draw_anchors
from dflash.drafter.masks import TILE, block_mask, dense_mask, mask_tables, num_anchors_for
from dflash.errors import ConfigError

# Document lengths that leave a padding tail in 512 positions, or none.
LAYOUTS = {
    "1 document": [512],
    "1 document, padding tail": [300],
    "2 documents": [200, 312],
    "2 documents on tile bounds": [128, 256],
    "4 documents": [5, 250, 130, 90],
    "20 documents": [25] * 20,
    "20 short documents": [3] * 20,
    "nothing valid": [1] * 20,
    "only padding": [],
}
BUDGET = 512


def drawn(lengths: list[int], *, num_anchors: int, seed: int) -> tuple[Anchors, Tensor, Tensor]:
    """Return anchors, documents_T and starts_T."""
    documents_T, positions_T = packed(lengths, token_budget=BUDGET)
    anchors = draw_anchors(
        documents_T >= 0,
        documents_T,
        positions_T,
        scores_T=anchor_scores(seed, 0, num_positions=BUDGET, device="cpu"),
        num_anchors=num_anchors,
    )
    return anchors, documents_T, torch.arange(BUDGET) - positions_T


def listed(counts: Tensor | None, tiles: Tensor | None, width: int) -> Tensor:
    """Return bool [rows, width]: which tiles a flex kernel visits."""
    assert counts is not None
    assert tiles is not None
    assert counts.dtype == tiles.dtype == torch.int32
    table = torch.zeros(counts.shape[-1], width, dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        visited = tiles[0, 0, row, :count].tolist()
        assert len(set(visited)) == count
        table[row, visited] = True
    return table


def tables_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the partial and the full tiles by query tile, and check the transposed tables."""
    rows, columns = (math.ceil(length / TILE) for length in mask.seq_lengths)
    partial = listed(mask.kv_num_blocks, mask.kv_indices, columns)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    # The backward kernel walks key tiles; its tables must name the same pairs.
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, rows).T, partial)
    assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, rows).T, full)
    return partial, full


@pytest.mark.parametrize("lengths", [[24], [9, 12], [4] * 6, [1] * 24, []])
def test_the_dense_mask_is_the_rule_one_pair_at_a_time(lengths: list[int]) -> None:
    documents_T, positions_T = packed(lengths, token_budget=24)
    anchors = draw_anchors(
        documents_T >= 0,
        documents_T,
        positions_T,
        scores_T=anchor_scores(0, 0, num_positions=24, device="cpu"),
        num_anchors=9,
    )
    expected = oracles.may_read(
        anchors.anchors_N.tolist(), anchors.used_N.tolist(), documents_T.tolist(), block_size=3
    )
    assert torch.equal(dense_mask(anchors, documents_T, block_size=3), expected)


def test_no_row_of_the_dense_mask_is_empty() -> None:
    for lengths in LAYOUTS.values():
        anchors, documents_T, _ = drawn(lengths, num_anchors=32, seed=0)
        assert dense_mask(anchors, documents_T, block_size=8).any(dim=1).all()


@pytest.mark.parametrize("block_size", [4, 8, 10, 16, 48, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiles_cover_the_dense_mask_and_full_tiles_are_full(
    layout: str, block_size: int
) -> None:
    step = TILE // math.gcd(TILE, block_size)
    for seed, num_anchors in ((0, step), (1, 2 * step), (2, 3 * step)):
        anchors, documents_T, starts_T = drawn(LAYOUTS[layout], num_anchors=num_anchors, seed=seed)
        dense = dense_mask(anchors, documents_T, block_size=block_size)
        partial, full = tables_of(block_mask(anchors, starts_T, block_size=block_size))
        by_tile = dense.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)
        assert not (partial & full).any()
        assert not (by_tile.flatten(2).any(dim=2) & ~partial & ~full).any()
        assert by_tile.flatten(2).all(dim=2)[full].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_full_tiles_are_exactly_those_of_create_block_mask(layout: str) -> None:
    anchors, documents_T, starts_T = drawn(LAYOUTS[layout], num_anchors=64, seed=3)
    dense = dense_mask(anchors, documents_T, block_size=8)
    expected = create_block_mask(
        lambda _b, _h, slot, column: dense[slot, column], None, None, *dense.shape, device="cpu"
    )
    _, full = tables_of(block_mask(anchors, starts_T, block_size=8))
    assert torch.equal(full, tables_of(expected)[1])


@pytest.mark.parametrize("block_size", [8, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_function_is_the_dense_mask(layout: str, block_size: int) -> None:
    anchors, documents_T, starts_T = drawn(LAYOUTS[layout], num_anchors=64, seed=4)
    dense = dense_mask(anchors, documents_T, block_size=block_size)
    mask = block_mask(anchors, starts_T, block_size=block_size)
    slot, column = torch.arange(dense.shape[0])[:, None], torch.arange(dense.shape[1])
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, slot, column), dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_attention_agrees_with_dense_attention(layout: str) -> None:
    # Uncompiled flex ignores the tile tables; the tests above hold those.
    anchors, documents_T, starts_T = drawn(LAYOUTS[layout], num_anchors=32, seed=5)
    dense = dense_mask(anchors, documents_T, block_size=8)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, dense.shape[0], 16, generator=random)
    k, v = torch.randn(2, 1, 2, dense.shape[1], 16, generator=random)
    mask = block_mask(anchors, starts_T, block_size=8)
    flex = cast("Tensor", flex_attention(q, k, v, block_mask=mask, enable_gqa=True))
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=dense
    )
    torch.testing.assert_close(flex, exact, atol=1e-5, rtol=0)


def test_blocks_without_an_anchor_visit_no_context_tile() -> None:
    anchors, _, starts_T = drawn([100], num_anchors=512, seed=0)
    assert int(anchors.used_N.sum()) == 98
    partial, full = tables_of(block_mask(anchors, starts_T, block_size=8))
    context = (partial | full)[:, : BUDGET // TILE]
    assert context.sum(dim=1).tolist() == [1] * 7 + [1] * 25
    assert not full.any()


def test_the_largest_tables_hold_what_arithmetic_says() -> None:
    # T = 49,152 and N * B = 131,072: Q * S is beyond 32 bits.
    token_budget, block_size, num_anchors = 49_152, 16, 8_192
    lengths = [7_001] * 7
    documents_T, positions_T = packed(lengths, token_budget=token_budget)
    anchors = draw_anchors(
        documents_T >= 0,
        documents_T,
        positions_T,
        scores_T=anchor_scores(0, 0, num_positions=token_budget, device="cpu"),
        num_anchors=num_anchors,
    )
    starts_T = torch.arange(token_budget) - positions_T
    tables = mask_tables(anchors, starts_T, block_size=block_size)
    for tile in (0, 1, 511, 700, 1023):
        rows = anchors.anchors_N[tile * 8 : tile * 8 + 8].tolist()
        starts = [row // 7_001 * 7_001 for row in rows]
        full = range(math.ceil(max(starts) / TILE), min(rows) // TILE)
        seen = range(min(starts) // TILE, math.ceil(max(rows) / TILE))
        partial = [column for column in seen if column not in full]
        for counts, tiles, expected in (
            (tables.full_counts_I, tables.full_tiles_IJ, list(full)),
            (tables.partial_counts_I, tables.partial_tiles_IJ, [*partial, 384 + tile]),
        ):
            count = int(counts[0, 0, tile])
            assert tiles[0, 0, tile, :count].tolist() == expected


def test_sizes_that_do_not_fill_tiles_are_refused() -> None:
    anchors = Anchors(torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.bool))
    with pytest.raises(ConfigError, match="token budget in multiples of 128, got 100"):
        mask_tables(anchors, torch.zeros(100, dtype=torch.int64), block_size=8)
    with pytest.raises(ConfigError, match="drafted slots in multiples of 128, got 112"):
        mask_tables(anchors, torch.zeros(128, dtype=torch.int64), block_size=7)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3072, 1 / 6, 16), 512),
        ((3072, 0.1, 16), 312),
        ((64, 0.001, 16), 8),
        ((512, 0.1, 10), 64),
        ((1024, 0.3, 8), 320),
        ((128, 1.0, 256), 128),
    ],
)
def test_the_number_of_anchors_fills_whole_tiles(
    sizes: tuple[int, float, int], expected: int
) -> None:
    num_anchors = num_anchors_for(*sizes)
    assert num_anchors == expected
    assert num_anchors * sizes[2] % TILE == 0
