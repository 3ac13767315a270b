"""What a prepared data set looks like: rows as runs of supervised and other text, and counts."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from dflash.data.shards import TokenDataset
from dflash.data.shuffle import random_order


class Run(NamedTuple):
    """Adjacent tokens of one kind, decoded."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """One row: where it was read, its length in tokens, its text."""

    place: str
    num_tokens: int
    runs: list[Run]


class LengthBin(NamedTuple):
    """Rows with lengths in first..last."""

    first: int
    last: int
    num_rows: int


def preview_rows(
    dataset: TokenDataset,
    tokenizer: Any,  # noqa: ANN401  # transformers is untyped
    *,
    num_rows: int,
    seed: int = 0,
) -> list[PreviewRow]:
    """Decode *num_rows* rows drawn by *seed*, in the order of the data set."""
    chosen = sorted(random_order(len(dataset), seed=seed, stream=0)[:num_rows].tolist())
    return [_preview_row(dataset, tokenizer, index) for index in chosen]


def _preview_row(dataset: TokenDataset, tokenizer: Any, index: int) -> PreviewRow:  # noqa: ANN401  # transformers is untyped
    tokens, loss_mask = dataset.row(index)
    runs = [
        Run(tokenizer.decode([token for _, token in run], skip_special_tokens=False), supervised)
        for supervised, run in groupby(
            zip(loss_mask.tolist(), tokens.tolist(), strict=True), key=lambda pair: pair[0]
        )
    ]
    return PreviewRow(dataset.source_of(index), len(tokens), runs)


def length_histogram(dataset: TokenDataset) -> list[LengthBin]:
    """Count rows by length in powers of two: 1, 2-3, 4-7, ...; empty ends are left out."""
    if len(dataset) == 0:
        return []
    exponents = np.frexp(dataset.lengths.astype(np.float64))[1] - 1
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [
        LengthBin(2**power, 2 ** (power + 1) - 1, int(counts[power]))
        for power in range(first, len(counts))
    ]


def summary(dataset: TokenDataset) -> dict[str, Any]:
    """Return the counts of a data set as plain JSON values."""
    manifest = dataset.manifest
    counts = manifest.counts
    return {
        **counts.model_dump(),
        "supervised_share": counts.supervised_share,
        "bad_share": counts.bad_share,
        "dropped": manifest.dropped,
        "dropped_rows": [row.model_dump() for row in manifest.dropped_rows],
        "sources": [source.model_dump() for source in manifest.sources],
        "vocab_size": manifest.vocab_size,
        "max_document_tokens": manifest.max_document_tokens,
        "length_histogram": [entry._asdict() for entry in length_histogram(dataset)],
    }
