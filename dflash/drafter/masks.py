"""Which positions a drafted slot may read: the dense truth and its analytic tile tables.

The rule, stated once: a slot reads the context of its anchor's document strictly before the anchor,
and the whole of its own block. A slot of an unused block reads its own block only, so that no
softmax row is empty and no tile is visited for nothing.

A document is contiguous, so ``same document and < anchor`` is ``start <= position < anchor``; that
is what the block mask computes. Tiles follow from anchors and starts by arithmetic: no dense mask,
no sort, no shape that depends on data.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.drafter.anchors import Anchors
from dflash.errors import ConfigError

TILE = 128  # rows and columns of a flex-attention tile; its kernels are tuned for this size


class MaskTables(NamedTuple):
    """Everything a ``BlockMask`` needs, as tensors (so that one graph may produce them).

    Tile tables are int32 with two leading axes of 1; ``*_tiles`` list tile numbers first, padding
    after. ``partial`` tiles ask the mask function, ``full`` tiles are visible throughout.

    Attributes:
        start_N: int32, first context row a block may read.
        stop_N: int32, first context row it may not read.
    """

    start_N: Tensor
    stop_N: Tensor
    partial_counts_I: Tensor
    partial_tiles_IJ: Tensor
    full_counts_I: Tensor
    full_tiles_IJ: Tensor
    partial_counts_J: Tensor
    partial_tiles_JI: Tensor
    full_counts_J: Tensor
    full_tiles_JI: Tensor


def num_anchors_for(token_budget: int, density: float, block_size: int) -> int:
    """Return N for ``density`` anchors per position, rounded up to whole tiles of N * B rows."""
    step = TILE // math.gcd(block_size, TILE)
    return max(1, math.ceil(math.ceil(density * token_budget) / step)) * step


def dense_mask(anchors: Anchors, documents_T: Tensor, *, block_size: int) -> Tensor:
    """Return bool mask_QS; columns are the T context rows, then the Q slots. True means may read.

    Args:
        anchors: the drafted blocks, as ``draw_anchors`` returns them.
        documents_T: int64, document of each position; padding is -1.
        block_size: B, slots per block.
    """
    context_NT = context_mask(anchors, documents_T)
    block_N = torch.arange(len(context_NT), device=documents_T.device)
    own_NQ = block_N[:, None] == block_N.repeat_interleave(block_size)
    return torch.cat([context_NT, own_NQ], dim=1).repeat_interleave(block_size, dim=0)


def context_mask(anchors: Anchors, documents_T: Tensor) -> Tensor:
    """Return bool context_NT: which context rows the slots of each block may read."""
    anchor_N1 = anchors.anchors_N[:, None]
    row_T = torch.arange(documents_T.numel(), device=documents_T.device)
    past_NT = row_T < anchor_N1  # strict: the anchor itself is slot 0
    same_document_NT = documents_T == documents_T[anchor_N1]
    return past_NT & same_document_NT & anchors.used_N[:, None]


def mask_tables(anchors: Anchors, starts_T: Tensor, *, block_size: int) -> MaskTables:
    """Compute the tile tables of the block mask; fixed shapes, no host synchronisation.

    Args:
        anchors: ascending, as ``draw_anchors`` returns them.
        starts_T: int64, row at which the document of each position starts.
        block_size: B, slots per block.

    Raises:
        ConfigError: T or N * B is not a multiple of the tile.
    """
    num_context, num_slots = starts_T.numel(), anchors.anchors_N.numel() * block_size
    for name, rows in (("token budget", num_context), ("number of drafted slots", num_slots)):
        if rows % TILE:
            raise ConfigError(f"flex attention needs a {name} in multiples of {TILE}, got {rows}")
    stop_N = anchors.anchors_N
    start_N = torch.where(anchors.used_N, starts_T[stop_N], stop_N)
    full_IJ, partial_IJ = _tiles(
        start_N, stop_N, num_context_tiles=num_context // TILE, block_size=block_size
    )
    kinds_IJ = torch.stack([partial_IJ, full_IJ])
    counts_I, tiles_IJ = _listed(kinds_IJ)
    counts_J, tiles_JI = _listed(kinds_IJ.transpose(1, 2))
    return MaskTables(
        start_N=start_N.to(torch.int32),
        stop_N=stop_N.to(torch.int32),
        partial_counts_I=counts_I[0],
        partial_tiles_IJ=tiles_IJ[0],
        full_counts_I=counts_I[1],
        full_tiles_IJ=tiles_IJ[1],
        partial_counts_J=counts_J[0],
        partial_tiles_JI=tiles_JI[0],
        full_counts_J=counts_J[1],
        full_tiles_JI=tiles_JI[1],
    )


def block_mask_from(tables: MaskTables, *, num_context: int, block_size: int) -> BlockMask:
    """Wrap the tables for flex attention; launches no kernel, so it may run every step."""
    num_slots = tables.start_N.numel() * block_size
    return BlockMask(
        seq_lengths=(num_slots, num_context + num_slots),
        kv_num_blocks=tables.partial_counts_I,
        kv_indices=tables.partial_tiles_IJ,
        full_kv_num_blocks=tables.full_counts_I,
        full_kv_indices=tables.full_tiles_IJ,
        q_num_blocks=tables.partial_counts_J,
        q_indices=tables.partial_tiles_JI,
        full_q_num_blocks=tables.full_counts_J,
        full_q_indices=tables.full_tiles_JI,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_mask_function(
            tables.start_N, tables.stop_N, num_context=num_context, block_size=block_size
        ),
    )


def block_mask(anchors: Anchors, starts_T: Tensor, *, block_size: int) -> BlockMask:
    """Return the flex-attention form of ``dense_mask``; same arguments, T and N * B in tiles."""
    tables = mask_tables(anchors, starts_T, block_size=block_size)
    return block_mask_from(tables, num_context=starts_T.numel(), block_size=block_size)


def _mask_function(
    start_N: Tensor, stop_N: Tensor, *, num_context: int, block_size: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def readable(_batch: Tensor, _head: Tensor, slot: Tensor, column: Tensor) -> Tensor:
        block = slot // block_size
        past = (column >= start_N[block]) & (column < stop_N[block])
        # A draft column is never below `stop`, which is a context row.
        own = (column >= num_context) & ((column - num_context) // block_size == block)
        return past | own

    return readable


def _tiles(
    start_N: Tensor, stop_N: Tensor, *, num_context_tiles: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return bool full_IJ and partial_IJ. Starts and stops ascend, so tile ends decide."""
    num_slots = start_N.numel() * block_size
    tile_I = torch.arange(num_slots // TILE, device=start_N.device)
    first_I = tile_I * TILE // block_size  # first and last block with a row in the tile
    last_I = (tile_I * TILE + TILE - 1) // block_size
    column_J = torch.arange(num_context_tiles, device=start_N.device)

    seen_from_I, seen_to_I = start_N[first_I] // TILE, -(-stop_N[last_I] // TILE)
    full_from_I, full_to_I = -(-start_N[last_I] // TILE), stop_N[first_I] // TILE
    seen_IJ = (column_J >= seen_from_I[:, None]) & (column_J < seen_to_I[:, None])
    full_IJ = (column_J >= full_from_I[:, None]) & (column_J < full_to_I[:, None])

    own_from_I = first_I * block_size // TILE
    own_to_I = (last_I * block_size + block_size - 1) // TILE
    own_II = (tile_I >= own_from_I[:, None]) & (tile_I <= own_to_I[:, None])
    full_IJ = torch.cat([full_IJ, torch.zeros_like(own_II)], dim=1)
    return full_IJ, torch.cat([seen_IJ, own_II], dim=1) & ~full_IJ


def _listed(kinds_XY: Tensor) -> tuple[Tensor, Tensor]:
    """Turn bool tables [kind, X, Y] into int32 counts [kind, 1, 1, X] and tile numbers first."""
    ones_XY = kinds_XY.to(torch.int32)
    rank_XY = torch.where(kinds_XY, ones_XY.cumsum(dim=2) - 1, kinds_XY.shape[2])
    number_Y = torch.arange(kinds_XY.shape[2], dtype=torch.int32, device=kinds_XY.device)
    # One spare column swallows the numbers of tiles that are not listed.
    listed_XY = torch.nn.functional.pad(torch.zeros_like(ones_XY), (0, 1))
    listed_XY = listed_XY.scatter(2, rank_XY, number_Y.expand_as(ones_XY))[..., :-1]
    return ones_XY.sum(dim=2, dtype=torch.int32)[:, None, None], listed_XY.contiguous()[
        :, None, None
    ]
