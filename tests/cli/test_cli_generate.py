"""generate from the command line, with the shipped target and a random drafter."""

import json
from pathlib import Path

import pytest
import transformers

from dflash.cli.__main__ import main
from dflash.decode import answer


def test_generate_streams_the_text_that_it_decoded(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(run_dir), "--prompt", "import os", "--max-new-tokens", "12"]
    arguments += ["--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out == report["text"] + "\n"
    assert "\033" not in shown.out
    assert "tok/s" in shown.err
    assert "tau" in shown.err
    assert main([*arguments, "--show-blocks"]) == 0
    barred = capsys.readouterr().out
    assert barred.count("|") == report["text"].count("|") + len(report["accepted"])
    assert barred.replace("|", "") == report["text"].replace("|", "") + "\n"


def test_generate_puts_a_chat_message_into_the_template(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(run_dir), "--chat", "hello", "--max-new-tokens", "4", "--json"]
    assert main([*arguments, "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 4


def test_sampling_from_the_command_line_repeats_with_its_seed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        arguments = ["generate", str(run_dir), "--prompt", "x", "--temperature", "1.5", "--json"]
        assert main([*arguments, "--max-new-tokens", "16", "--device", "cpu", "--seed", seed]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]


def test_generate_stops_where_the_positions_of_the_target_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "num_positions", lambda _config: 12)
    arguments = ["generate", str(run_dir), "--device", "cpu", "--json", "--max-new-tokens", "50"]
    assert main([*arguments, "--prompt", "import os"]) == 0
    said = capsys.readouterr()
    assert "note: stops after 3 tokens at the latest" in said.err
    assert len(json.loads(said.out)["tokens"]) <= 3
    assert main([*arguments, "--prompt", "import os, sys"]) == 2
    assert "a prompt of 14 tokens leaves no room" in capsys.readouterr().err
    measured = ["eval", str(run_dir), "--device", "cpu", "--max-new-tokens", "5"]
    monkeypatch.setattr(answer, "num_positions", lambda _config: 36)
    assert main(measured) == 2
    assert "hint: --max-new-tokens 4, or shorter prompts" in capsys.readouterr().err


def test_the_positions_of_a_target_are_what_its_config_says() -> None:
    plain = transformers.Qwen3Config(max_position_embeddings=512)
    assert answer.num_positions(plain) == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    scaled = transformers.Qwen3Config(max_position_embeddings=512, rope_scaling=yarn)
    assert answer.num_positions(scaled) == 2048
