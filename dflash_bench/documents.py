"""Random packed batches: how long their documents are, and where each position lies in its own."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dflash_bench.cases._case import Lengths
from dflash_bench.shapes import BenchShape

SHORTEST_SHARE, LONGEST_SHARE = 0.1, 1.9
"""Of the mean length of a document: what varying lengths lie between."""

LEAST_FILL = 0.7
"""Of varying batches: real tokens of T."""


def numbered_seed(seed: int, number: int) -> int:
    """A seed for each number of something that is drawn; torch takes what 64 bits hold."""
    return (seed * 1_000_003 + number) % 2**63


def document_bounds(shape: BenchShape, lengths: Lengths, number: int, *, seed: int) -> list[int]:
    """Return where the documents of batch *number* begin and end: 0 first, the real tokens last.

    Fixed: equal documents that fill T. Variable: as many on average, of lengths and of a sum that
    depend on the number.
    """
    if lengths == "fixed":
        length = shape.token_budget // shape.num_documents
        return [*range(0, length * shape.num_documents, length), shape.token_budget]
    random = torch.Generator().manual_seed(numbered_seed(seed, number))
    share = LEAST_FILL + (1 - LEAST_FILL) * float(torch.rand((), generator=random))
    num_real = max(2 * shape.num_documents, int(share * shape.token_budget))
    parts = torch.rand(shape.num_documents, generator=random)
    parts = SHORTEST_SHARE + (LONGEST_SHARE - SHORTEST_SHARE) * parts
    inner = (parts.cumsum(0) / parts.sum() * num_real).round().to(torch.int64).tolist()[:-1]
    return sorted({0, *inner, num_real})


def places(bounds: Sequence[int], token_budget: int) -> tuple[Tensor, Tensor]:
    """Return documents_T and positions_T of these documents, padding as in a packed batch."""
    documents_T = torch.full((token_budget,), -1, dtype=torch.int64)
    positions_T = torch.zeros(token_budget, dtype=torch.int64)
    for document, (start, stop) in enumerate(pairwise(bounds)):
        documents_T[start:stop] = document
        positions_T[start:stop] = torch.arange(stop - start)
    return documents_T, positions_T


def with_padding(bounds: Sequence[int], token_budget: int) -> list[int]:
    """The same bounds with the padding tail as a document of its own."""
    return [*bounds] if bounds[-1] == token_budget else [*bounds, token_budget]
