"""Which rows share a batch: best fit by decreasing length into bins of exactly T positions.

Everything follows from (lengths, token budget, seed): a batch is known by its number alone, so
there is no state to save and a resumed run continues with the very batch that comes next.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash.data.shuffle import random_order
from dflash.errors import DataError

MIN_PIECE_TOKENS = 3
"""An anchor needs a token before it and one after it; a shorter piece can teach nothing."""

_WORD_BITS = 64


class Piece(NamedTuple):
    """Tokens start..stop-1 of one row, a document of its own in the batch."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The bins of one epoch, in batch order: pieces ``order[bounds[b]:bounds[b + 1]]``."""

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]


class _Gaps:
    """Bins by the positions they have left, with the smallest sufficient gap found in O(1).

    A bitmap of the gaps that exist, in 64-bit words, with a second bitmap of the non-empty words.
    """

    def __init__(self, token_budget: int) -> None:
        self._words = [0] * (token_budget // _WORD_BITS + 1)
        self._summary = 0
        self._bins: dict[int, list[int]] = {}

    def add(self, gap: int, number: int) -> None:
        self._bins.setdefault(gap, []).append(number)
        self._words[gap // _WORD_BITS] |= 1 << gap % _WORD_BITS
        self._summary |= 1 << gap // _WORD_BITS

    def take(self, length: int) -> tuple[int, int] | None:
        """Remove and return (gap, bin) with the smallest gap >= length, None when there is none."""
        gap = self._smallest(length)
        if gap is None:
            return None
        bins = self._bins[gap]
        number = bins.pop()
        if not bins:
            word = gap // _WORD_BITS
            self._words[word] ^= 1 << gap % _WORD_BITS
            if not self._words[word]:
                self._summary ^= 1 << word
        return gap, number

    def _smallest(self, length: int) -> int | None:
        word, shift = divmod(length, _WORD_BITS)
        bits = self._words[word] >> shift
        if bits:
            return length + _lowest(bits)
        words = self._summary >> (word + 1)
        if not words:
            return None
        word += 1 + _lowest(words)
        return word * _WORD_BITS + _lowest(self._words[word])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def best_fit(lengths: list[int], token_budget: int) -> list[int]:
    """Return the bin of each length, taken in order: the fullest bin it fits, or a new one."""
    gaps, bins, num_bins = _Gaps(token_budget), [], 0
    for length in lengths:
        found = gaps.take(length)
        gap, number = (token_budget, num_bins) if found is None else found
        num_bins += found is None
        bins.append(number)
        if gap > length:
            gaps.add(gap - length, number)
    return bins


class Packing:
    """The batches of a run, by number. Cheap to build; an epoch is packed when first asked for.

    A row longer than min(max_document_tokens, token_budget) is split into consecutive pieces; a
    last piece shorter than ``MIN_PIECE_TOKENS`` is left out.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        *,
        token_budget: int,
        seed: int,
        max_document_tokens: int | None = None,
    ) -> None:
        self.token_budget = token_budget
        self.seed = seed
        limit = min(max_document_tokens or token_budget, token_budget)
        self._rows, self._starts, self._stops = _split(np.asarray(lengths, np.int64), limit)
        if len(self._rows) == 0:
            raise DataError("there is no row to pack into batches")
        self._first_batches = [0]  # number of the first batch of epoch 0, 1, ...
        self._packed: tuple[int, _Epoch] | None = None

    @property
    def num_pieces(self) -> int:
        """Number of pieces in every epoch."""
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in every epoch."""
        return int((self._stops - self._starts).sum())

    def batches_per_epoch(self, epoch: int) -> int:
        """Return the number of batches of this epoch; it may differ a little between epochs."""
        while len(self._first_batches) <= epoch + 1:
            bounds = self._epoch(len(self._first_batches) - 1).bounds
            self._first_batches.append(self._first_batches[-1] + len(bounds) - 1)
        return self._first_batches[epoch + 1] - self._first_batches[epoch]

    def first_batch(self, epoch: int) -> int:
        """Return the global number of the first batch of this epoch."""
        if epoch:
            self.batches_per_epoch(epoch - 1)
        return self._first_batches[epoch]

    def epoch_of(self, number: int) -> int:
        """Return the epoch to which this global batch number belongs."""
        if number < 0:
            raise ValueError(f"batch number {number} is negative")
        while self._first_batches[-1] <= number:
            self.batches_per_epoch(len(self._first_batches) - 1)
        return bisect_right(self._first_batches, number) - 1

    def plan(self, number: int) -> list[Piece]:
        """Return the pieces of the batch with this global number, in their order in the batch."""
        epoch = self.epoch_of(number)
        packed = self._epoch(epoch)
        index = number - self._first_batches[epoch]
        chosen = packed.order[packed.bounds[index] : packed.bounds[index + 1]]
        columns = (self._rows[chosen], self._starts[chosen], self._stops[chosen])
        return [Piece(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]

    def fill(self, epoch: int) -> float:
        """Return real tokens / positions of this epoch."""
        return self.num_tokens / (self.batches_per_epoch(epoch) * self.token_budget)

    def _epoch(self, epoch: int) -> _Epoch:
        if self._packed is None or self._packed[0] != epoch:
            self._packed = (epoch, self._pack(epoch))
        return self._packed[1]

    def _pack(self, epoch: int) -> _Epoch:
        """Pack by decreasing length, ties in random order; then shuffle bins and their pieces."""
        order = random_order(self.num_pieces, seed=self.seed, stream=2 * epoch)
        lengths = (self._stops - self._starts)[order]
        decreasing = np.argsort(-lengths, kind="stable")
        order, lengths = order[decreasing], lengths[decreasing]
        bins = np.array(best_fit(lengths.tolist(), self.token_budget), dtype=np.int64)
        num_bins = int(bins.max()) + 1
        place = np.empty(num_bins, dtype=np.int64)
        place[random_order(num_bins, seed=self.seed, stream=2 * epoch + 1)] = np.arange(num_bins)
        bins = place[bins]
        mixed = random_order(self.num_pieces, seed=self.seed, stream=~epoch)
        by_bin = mixed[np.argsort(bins[mixed], kind="stable")]
        bounds = np.concatenate([[0], np.bincount(bins, minlength=num_bins).cumsum()])
        return _Epoch(order[by_bin], bounds.astype(np.int64))


def _split(
    lengths: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return row, start and stop of every piece of at most *limit* tokens."""
    counts = -(-lengths // limit)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    firsts = np.repeat(counts.cumsum() - counts, counts)
    starts = (np.arange(len(rows), dtype=np.int64) - firsts) * limit
    stops = np.minimum(starts + limit, lengths[rows])
    kept = stops - starts >= MIN_PIECE_TOKENS
    return rows[kept], starts[kept], stops[kept]
