"""From files to token rows: what is read, kept, cut, dropped, listed and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import MISTRAL, MakeTokenizer
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from dflash.data.manifest import MANIFEST_NAME
from dflash.data.prepare import prepare
from dflash.data.rows import RowError, parse_row
from dflash.data.shards import TokenDataset
from dflash.errors import DataError, MissingError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
GOOD = {"messages": [USER, ASSISTANT]}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Bench:
    """Prepares sources of a test's folder with its tokenizer."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder = folder
        self.tokenizer = tokenizer

    def __call__(self, *sources: str | Path, out: str = "out", **changed: Any) -> TokenDataset:  # noqa: ANN401
        options = {
            "tokenizer": self.tokenizer,
            "max_document_tokens": 64,
            "max_bad_share": 0.0,
            "vocab_size": len(self.tokenizer),
        }
        return prepare(list(sources), self.folder / out, **{**options, **changed})

    def rows(self, rows: list[Any], **changed: Any) -> TokenDataset:  # noqa: ANN401
        return self(write_jsonl(self.folder / "rows.jsonl", rows), **changed)


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Bench:
    return Bench(tmp_path, tokenizer)


def supervised(bench: Bench, dataset: TokenDataset, row: int) -> str:
    tokens, mask = dataset.row(row)
    return str(bench.tokenizer.decode(tokens[mask].tolist()))


def test_messages_sharegpt_tokens_and_text_are_read(bench: Bench) -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    rows = [
        GOOD,
        {"conversations": sharegpt},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]},
        {"text": "Hello! Bye."},
    ]
    dataset = bench.rows(rows)
    assert len(dataset) == 4
    assert supervised(bench, dataset, 0) == supervised(bench, dataset, 1) == "Hello!<|im_end|>"
    assert dataset.row(2)[0].tolist() == [5, 6, 7, 8]
    assert dataset.row(2)[1].tolist() == [False, True, True, True]
    assert dataset.row(3)[1].all()
    assert [dataset.source_of(row).rpartition("/")[2] for row in range(4)] == [
        f"rows.jsonl:{line}" for line in (1, 2, 3, 4)
    ]


def test_parquet_is_read_like_jsonl(bench: Bench, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [GOOD, {"messages": [USER]}, GOOD]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = bench(tmp_path / "rows.parquet", max_bad_share=0.5)
    assert [supervised(bench, dataset, row) for row in (0, 1)] == ["Hello!<|im_end|>"] * 2
    assert [row.place.rpartition("/")[2] for row in dataset.stats.dropped_rows] == [
        "rows.parquet:2"
    ]


def test_parquet_without_pyarrow_names_the_extra(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingError, match=r"pip install 'dflash-trainer\[parquet\]'"):
        bench(tmp_path / "rows.parquet")


def test_a_damaged_parquet_file_is_refused(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="not a readable parquet file"):
        bench(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        (None, "null instead of an object"),
        ([1], "a JSON array instead of an object"),
        (True, "a JSON boolean instead of an object"),
        (1.5, "a JSON number instead of an object"),
        ({"messages": [{"content": "Hi"}]}, "message 1 has no role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, 'message 1 has the role "robot"'),
    ],
)
def test_a_bad_row_is_described_in_the_words_of_json(row: object, detail: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row, tokenizer_hash="")
    assert caught.value.detail.endswith(detail)


BAD_ROWS = [
    ("invalid_json", '{"messages": ['),
    ("unknown_format", "[1, 2]"),
    ("unknown_format", {"prompt": "Hi"}),
    ("bad_message", {"messages": []}),
    ("bad_message", {"messages": [{"role": "robot", "content": "Hi"}]}),
    ("bad_message", {"messages": [{"role": "assistant", "content": ["Hi"]}]}),
    ("bad_message", {"conversations": [{"from": "nobody", "value": "Hi"}]}),
    ("no_assistant_turn", {"messages": [USER]}),
    ("nothing_supervised", {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]}),
    ("too_short", {"input_ids": [1, 2], "loss_mask": [1, 1]}),
    ("too_short", {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 0, 1]}),
    ("cut_away", {"input_ids": [1] * 70, "loss_mask": [0] * 65 + [1] * 5}),
    ("mask_length", {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1]}),
    ("bad_tokens", {"input_ids": [1, 2, 3.5, 4], "loss_mask": [1, 1, 1, 1]}),
    ("bad_tokens", {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 2, 1]}),
    ("bad_tokens", {"input_ids": [1, 2, 3, 4]}),
    ("token_out_of_vocabulary", {"input_ids": [1, 2, 10**6, 4], "loss_mask": [1, 1, 1, 1]}),
    ("token_out_of_vocabulary", {"input_ids": [1, -2, 3, 4], "loss_mask": [1, 1, 1, 1]}),
]


@pytest.mark.parametrize(("reason", "bad"), BAD_ROWS)
def test_a_bad_row_is_dropped_counted_and_listed_by_line(
    bench: Bench, reason: str, bad: object
) -> None:
    dataset = bench.rows([GOOD, bad, GOOD], max_bad_share=0.5)
    assert len(dataset) == 2
    assert dataset.stats.dropped == {reason: 1}
    (listed,) = dataset.stats.dropped_rows
    assert (listed.place.rpartition("/")[2], listed.reason) == ("rows.jsonl:2", reason)
    assert dataset.stats.counts.num_rows_read == 3


def test_a_row_that_is_not_utf8_is_dropped(bench: Bench, tmp_path: Path) -> None:
    good = json.dumps(GOOD).encode()
    (tmp_path / "rows.jsonl").write_bytes(good + b'\n{"text": "\xff"}\n' + good)
    dataset = bench(tmp_path / "rows.jsonl", max_bad_share=0.5)
    assert dataset.stats.dropped == {"not_utf8": 1}


def test_a_template_that_fails_drops_the_row(bench: Bench, make_tokenizer: MakeTokenizer) -> None:
    bench.tokenizer = make_tokenizer(MISTRAL)
    dataset = bench.rows([GOOD, {"messages": [USER, USER, ASSISTANT]}], max_bad_share=0.5)
    assert dataset.stats.dropped == {"template_error": 1}
    assert "must alternate" in dataset.stats.dropped_rows[0].detail


def test_too_many_bad_rows_stop_with_counts_and_places(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 of 4 rows are bad \(50\.0%") as caught:
        bench.rows([GOOD, "{", {"messages": [USER]}, GOOD], max_bad_share=0.25)
    assert "rows.jsonl:2 (not valid JSON" in caught.value.what
    assert "rows.jsonl:3 (no assistant turn)" in caught.value.what
    assert caught.value.exit_code == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_reused_preparation_is_judged_by_the_share_of_this_run(bench: Bench) -> None:
    bench.rows([GOOD, "{"], max_bad_share=0.5)
    with pytest.raises(DataError, match="1 of 2 rows are bad"):
        bench.rows([GOOD, "{"], max_bad_share=0.1)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_data_set_is_refused(bench: Bench, tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl: the data set is empty"):
        bench(tmp_path / "rows.jsonl")


def test_a_data_set_of_bad_rows_only_is_refused_whatever_the_share(bench: Bench) -> None:
    with pytest.raises(DataError, match="none of 1 rows can be used"):
        bench.rows(["{"], max_bad_share=1.0)


def test_a_long_text_is_split_into_consecutive_rows(bench: Bench, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "long.txt").write_text(text)
    dataset = bench(tmp_path / "long.txt")
    assert dataset.lengths[:-1].tolist() == [64] * (len(dataset) - 1)
    joined = np.concatenate([dataset.row(row)[0] for row in range(len(dataset))])
    assert bench.tokenizer.decode(joined.tolist()) == text
    before = bench.tokenizer.decode(joined[:64].tolist())
    assert dataset.source_of(1).endswith(f"long.txt:{1 + before.count(chr(10))}")


def test_a_long_conversation_is_cut_at_the_end(bench: Bench) -> None:
    long = {"messages": [USER, {"role": "assistant", "content": "yes and no " * 100}]}
    dataset = bench.rows([long])
    counts = dataset.stats.counts
    assert dataset.lengths.tolist() == [64]
    assert (counts.num_cut_rows, counts.num_rows) == (1, 1)
    text = bench.tokenizer.apply_chat_template(long["messages"], tokenize=False)
    ids = bench.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert dataset.row(0)[0].tolist() == ids[:64]
    assert counts.num_cut_tokens == len(ids) - 64


def test_an_equal_preparation_is_reused(bench: Bench, tmp_path: Path) -> None:
    bench.rows([GOOD])
    shard = tmp_path / "out" / "tokens-00000.safetensors"
    before = shard.stat().st_mtime_ns
    bench.rows([GOOD])
    assert shard.stat().st_mtime_ns == before


def test_another_preparation_replaces_the_old_one(
    bench: Bench, tmp_path: Path, make_tokenizer: MakeTokenizer
) -> None:
    keys = {bench.rows([GOOD]).stats.key, bench.rows([GOOD, GOOD]).stats.key}
    keys.add(bench.rows([GOOD, GOOD], max_document_tokens=32).stats.key)
    bench.tokenizer = make_tokenizer(MISTRAL)
    keys.add(bench.rows([GOOD, GOOD], max_document_tokens=32).stats.key)
    assert len(keys) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def test_a_folder_of_something_else_is_not_overwritten(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")
    with pytest.raises(DataError, match="is no prepared data set"):
        bench.rows([GOOD])


def test_a_prepared_folder_is_a_source(bench: Bench, make_tokenizer: MakeTokenizer) -> None:
    prepared = bench.rows([GOOD])
    assert bench(prepared.folder, out="other").folder == prepared.folder
    with pytest.raises(DataError, match="for a vocabulary of"):
        bench(prepared.folder, out="other", vocab_size=10)
    bench.tokenizer = make_tokenizer()
    bench.tokenizer.add_tokens(["a-new-token"])
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        bench(prepared.folder, out="other")


def test_tokens_of_another_tokenizer_give_way_to_the_messages(bench: Bench) -> None:
    foreign = {**GOOD, "input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "tokenizer": "another"}
    assert supervised(bench, bench.rows([foreign]), 0) == "Hello!<|im_end|>"


def test_large_inputs_become_several_shards(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.data.shards.ShardWriter.__init__.__kwdefaults__", SMALL_SHARDS)
    rows = [
        {"input_ids": list(range(n, n + 10)), "loss_mask": [0] * 5 + [1] * 5} for n in range(30)
    ]
    dataset = bench.rows(rows)
    assert len(dataset.stats.shards) == 5
    assert [dataset.row(n)[0].tolist() for n in range(30)] == [row["input_ids"] for row in rows]
    flat = load_file(tmp_path / "out" / "tokens-00001.safetensors")
    assert flat["tokens"].tolist() == [token for row in rows[6:12] for token in row["input_ids"]]


SMALL_SHARDS = {"shard_bytes": 300}


def test_a_truncated_shard_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.rows([GOOD])
    shard = tmp_path / "out" / "tokens-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match="bytes, the manifest says"):
        TokenDataset.open(tmp_path / "out")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm", "says"),
    [
        ("tokens-00000.safetensors", cut, "bytes, the manifest says"),
        ("tokens-00000.safetensors", flip, "damaged shard, its sha256 is not the manifest's"),
        ("tokens-00000.safetensors", Path.unlink, "cannot be read (No such file or directory)"),
        ("manifest.json", cut, "damaged manifest"),
        ("manifest.json", lambda path: path.write_text('{"format": "dflash-tokens"'), "damaged"),
    ],
    ids=["cut shard", "flipped bit", "missing shard", "cut manifest", "half a manifest"],
)
def test_a_damaged_preparation_is_named_and_made_again_once_it_is_removed(
    bench: Bench, tmp_path: Path, *, name: str, harm: Callable[[Path], None], says: str
) -> None:
    bench.rows([GOOD])
    harm(tmp_path / "out" / name)
    with pytest.raises(DataError) as caught:
        bench.rows([GOOD])
    assert caught.value.what.startswith(f"{tmp_path / 'out' / name}: ")
    assert says in caught.value.what
    assert caught.value.hint == (
        f"remove the folder {tmp_path / 'out'}: the same command prepares it again"
    )
    shutil.rmtree(tmp_path / "out")
    assert len(bench.rows([GOOD])) == 1


def test_a_source_with_a_damaged_manifest_is_named_too(bench: Bench) -> None:
    prepared = bench.rows([GOOD])
    cut(prepared.folder / MANIFEST_NAME)
    with pytest.raises(DataError, match="damaged manifest") as caught:
        bench(prepared.folder, out="other")
    assert caught.value.hint == "prepare the data again"


def test_a_damaged_or_older_manifest_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.rows([GOOD])
    manifest = tmp_path / "out" / MANIFEST_NAME
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**value, "version": 0}))
    with pytest.raises(DataError, match="version 0 of the format, this program reads version 1"):
        TokenDataset.open(tmp_path / "out")
    manifest.write_text('{"format": "dflash-tokens", "version": 1}')
    with pytest.raises(DataError, match="damaged manifest"):
        TokenDataset.open(tmp_path / "out")
    with pytest.raises(DataError, match="no prepared data set there"):
        TokenDataset.open(tmp_path / "nowhere")


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("dflash.data.shards.save_file", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device"):
        bench.rows([GOOD])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
