"""``dflash data`` as a user calls it: results on stdout, talk on stderr, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.cli.__main__ import main
from dflash.data.preview import length_histogram
from dflash.data.shards import TokenDataset

GOOD = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
}


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(tmp_path / "tok")
    rows = [json.dumps(GOOD), "{", json.dumps(GOOD)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_inspect_marks_supervised_text_and_counts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["data", "inspect", str(folder / "rows.jsonl"), "--tokenizer", str(folder / "tok")])
    out = capsys.readouterr().out
    assert code == 0
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n" in out
    assert "rows.jsonl:2" in out
    assert "not valid JSON" in out
    assert "\x1b" not in out


def test_prepare_prints_one_json_value_on_stdout(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokenizer", str(folder / "tok"), "--out", str(folder / "out"), "--json"]
    source = str(folder / "rows.jsonl")
    assert main(["data", "prepare", source, *arguments, "--max-bad-share", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["num_rows_read"], found["dropped"]) == (
        *(2, 3),
        {"invalid_json": 1},
    )
    assert found["supervised_share"] == found["num_supervised_tokens"] / found["num_tokens"]
    again = ["data", "inspect", str(folder / "out"), "--tokenizer", str(folder / "tok"), "--json"]
    assert main(again) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert len(inspected.pop("rows")) == 2
    assert inspected == found


def test_bad_rows_beyond_the_share_exit_12(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokenizer", str(folder / "tok"), "--out", str(folder / "out")]
    assert main(["data", "prepare", str(folder / "rows.jsonl"), *arguments]) == 12
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "1 of 3 rows are bad" in caught.err
    assert not (folder / "out").exists()


def test_a_missing_file_exits_12(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["data", "inspect", str(folder / "no.jsonl"), "--tokenizer", str(folder / "tok")])
    assert code == 12
    assert "no.jsonl: no such file or folder" in capsys.readouterr().err


def test_the_histogram_counts_every_row_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        json.dumps({"input_ids": [1] * length, "loss_mask": [1] * length})
        for length in (3, 4, 7, 8, 8, 40)
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    arguments = ["--tokenizer", str(folder / "tok"), "--out", str(folder / "out"), "--json"]
    assert main(["data", "prepare", str(folder / "rows.jsonl"), *arguments]) == 0
    histogram = length_histogram(TokenDataset.open(folder / "out"))
    assert [tuple(entry) for entry in histogram] == [
        *((2, 3, 1), (4, 7, 2), (8, 15, 2), (16, 31, 0), (32, 63, 1)),
    ]
    shown = json.loads(capsys.readouterr().out)["length_histogram"]
    assert [entry["num_rows"] for entry in shown] == [1, 2, 2, 0, 1]


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; import dflash.cli.data; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_synthesize_writes_rows_that_inspect_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "2", "--max-user-tokens", "6", "--max-answer-tokens", "8"]
    command = ["data", "synthesize", "--target", "stdlib-lm", "--out", str(tmp_path / "syn")]
    assert main([*command, *sizes, "--num", "4", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["num_rows"] >= 4
    assert written["num_rows"] + sum(written["dropped"].values()) == written["num_drawn"]
    assert (
        main(["data", "inspect", str(tmp_path / "syn"), "--tokenizer", "stdlib-lm", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["num_rows"] == written["num_rows"]


def test_a_device_that_does_not_exist_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "synthesize", "--target", "stdlib-lm", "--out", str(tmp_path / "syn")]
    assert main([*command, "--num", "1", "--device", "cuda:99"]) == 2
    assert "--device cuda:99: cannot be used" in capsys.readouterr().err


def test_text_share_without_text_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "synthesize", "--target", "stdlib-lm", "--out", str(tmp_path / "syn")]
    assert main([*command, "--num", "1", "--text-share", "0.5"]) == 2
    assert "--text-share needs --text" in capsys.readouterr().err
