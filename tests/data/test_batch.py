"""A packed batch says the same as its rows laid end to end; prompts end where answers begin."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.batch import PackedBatch, assemble
from dflash.data.packing import Packing
from dflash.data.prepare import prepare
from dflash.data.prompts import heldout_prompts
from dflash.data.shards import TokenDataset

BUDGET = 50


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> TokenDataset:
    draw = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("batches")
    rows = []
    for length in draw.integers(4, 40, 60).tolist():
        ids = draw.integers(0, 256, length).tolist()
        first = length // 3
        rows.append({"input_ids": ids, "loss_mask": [0] * first + [1] * (length - first)})
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return prepare(
        [folder / "rows.jsonl"],
        folder / "out",
        tokenizer=tokenizer,
        max_document_tokens=BUDGET,
        max_bad_share=0.0,
        vocab_size=256,
    )


@pytest.fixture
def packing(dataset: TokenDataset) -> Packing:
    return Packing(dataset.lengths, token_budget=BUDGET, seed=5, max_document_tokens=BUDGET)


def test_a_batch_is_its_rows_end_to_end_and_padding(
    dataset: TokenDataset, packing: Packing
) -> None:
    buffer = PackedBatch.allocate(BUDGET)
    for number in range(packing.batches_per_epoch(0) + 3):
        tokens, documents, positions, mask, bounds = [], [], [], [], [0]
        for document, piece in enumerate(packing.plan(number)):
            row_tokens, row_mask = dataset.row(piece.row)
            for offset, index in enumerate(range(piece.start, piece.stop)):
                tokens.append(int(row_tokens[index]))
                mask.append(bool(row_mask[index]))
                documents.append(document)
                positions.append(offset)
            bounds.append(len(tokens))
        real, padding = len(tokens), BUDGET - len(tokens)
        batch = assemble(dataset, packing, number, out=buffer)
        assert batch is buffer
        assert batch.number == number
        assert batch.tokens_T.tolist() == tokens + [0] * padding
        assert batch.documents_T.tolist() == documents + [-1] * padding
        assert batch.positions_T.tolist() == positions + [0] * padding
        assert batch.loss_mask_T.tolist() == mask + [False] * padding
        assert batch.cu_lengths == bounds + [BUDGET] * (padding > 0)
        assert (batch.num_real_tokens, batch.num_supervised_tokens) == (real, sum(mask))
        assert batch.num_documents == len(batch.rows) == len(bounds) - 1


def test_a_buffer_of_another_size_is_refused(dataset: TokenDataset, packing: Packing) -> None:
    with pytest.raises(ValueError, match="a buffer of 7 positions for 50"):
        assemble(dataset, packing, 0, out=PackedBatch.allocate(7))


def test_prompts_end_where_supervision_begins(dataset: TokenDataset) -> None:
    prompts = heldout_prompts(dataset, num_prompts=10, seed=0)
    rows = [dataset.row(row) for row in range(len(dataset))]
    heads = [tokens[: mask.tolist().index(True)].tolist() for tokens, mask in rows]
    assert len(prompts) == 10
    assert all(prompt in heads for prompt in prompts)
    assert prompts == heldout_prompts(dataset, num_prompts=10, seed=0)
    assert prompts != heldout_prompts(dataset, num_prompts=10, seed=1)
    assert len(heldout_prompts(dataset, num_prompts=10**6, seed=0)) == len(dataset)


def test_a_text_gives_its_first_half_up_to_64_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "short.txt").write_text("zq" * 10)
    (tmp_path / "zlong.txt").write_text("zq" * 200)
    dataset = prepare(
        [tmp_path / "short.txt", tmp_path / "zlong.txt"],
        tmp_path / "out",
        tokenizer=tokenizer,
        max_document_tokens=1000,
        max_bad_share=0.0,
        vocab_size=len(tokenizer),
    )
    assert dataset.lengths.tolist() == [20, 400]
    prompts = heldout_prompts(dataset, num_prompts=2, seed=0)
    assert sorted(len(prompt) for prompt in prompts) == [10, 64]
