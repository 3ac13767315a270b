"""One packed batch on the host: documents end to end, padded to exactly T positions.

Shape legend: T positions (the token budget).
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from dflash.data.packing import Packing
from dflash.data.shards import TokenDataset

PADDING_DOCUMENT = -1


@dataclass(slots=True)
class PackedBatch:
    """CPU tensors of one packed batch; reused as a buffer by :func:`assemble`.

    Attributes:
        number: global batch number, -1 before the first filling.
        tokens_T: int64, token ids; 0 in padding.
        documents_T: int64, 0, 1, 2.. in order; -1 in padding.
        positions_T: int64, position within the document; 0 in padding.
        loss_mask_T: bool, True = supervised.
        cu_lengths: bounds of the documents, 0 first and T last; the padding tail is a segment.
        rows: row of the data set of each document.
    """

    tokens_T: torch.Tensor
    documents_T: torch.Tensor
    positions_T: torch.Tensor
    loss_mask_T: torch.Tensor
    number: int = -1
    cu_lengths: list[int] = field(default_factory=list)
    num_real_tokens: int = 0
    num_supervised_tokens: int = 0
    num_documents: int = 0
    rows: list[int] = field(default_factory=list)

    @classmethod
    def allocate(cls, token_budget: int, *, pinned: bool = False) -> "PackedBatch":
        """Allocate buffers of *token_budget* positions, page-locked when *pinned*."""
        shape = (token_budget,)
        return cls(
            tokens_T=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
            documents_T=torch.full(shape, -1, dtype=torch.int64, pin_memory=pinned),
            positions_T=torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
            loss_mask_T=torch.zeros(shape, dtype=torch.bool, pin_memory=pinned),
        )

    @property
    def padding_share(self) -> float:
        """Padding positions / all positions."""
        return 1.0 - self.num_real_tokens / len(self.tokens_T)


def assemble(
    dataset: TokenDataset, packing: Packing, number: int, *, out: PackedBatch | None = None
) -> PackedBatch:
    """Fill *out* (or new buffers) with the batch of this global number and return it."""
    token_budget = packing.token_budget
    batch = PackedBatch.allocate(token_budget) if out is None else out
    if len(batch.tokens_T) != token_budget:
        raise ValueError(f"a buffer of {len(batch.tokens_T)} positions for {token_budget}")
    tokens, documents = batch.tokens_T.numpy(), batch.documents_T.numpy()
    positions, mask = batch.positions_T.numpy(), batch.loss_mask_T.numpy()
    pieces = packing.plan(number)
    bounds = [0]
    for document, piece in enumerate(pieces):
        row_tokens, row_mask = dataset.row(piece.row)
        start, stop = bounds[-1], bounds[-1] + piece.stop - piece.start
        tokens[start:stop] = row_tokens[piece.start : piece.stop]
        mask[start:stop] = row_mask[piece.start : piece.stop]
        documents[start:stop] = document
        positions[start:stop] = np.arange(stop - start)
        bounds.append(stop)
    end = bounds[-1]
    tokens[end:], documents[end:], positions[end:], mask[end:] = 0, PADDING_DOCUMENT, 0, False
    batch.number = number
    batch.cu_lengths = bounds if end == token_budget else [*bounds, token_budget]
    batch.num_real_tokens = end
    batch.num_supervised_tokens = int(mask.sum())
    batch.num_documents = len(pieces)
    batch.rows = [piece.row for piece in pieces]
    return batch
