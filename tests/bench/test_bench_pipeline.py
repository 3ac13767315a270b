"""The pipeline bench in miniature on a CPU: the production pipeline, each side alone, both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import write_texts

from dflash_bench import pipeline
from dflash_bench.block_mask import main as block_mask
from dflash_bench.marks import Window, joined
from dflash_bench.random_target import random_target, write_definitions
from dflash_bench.shapes import SHAPES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    write_texts(folder / "texts")
    arguments = "--shape tiny --target-device cpu --drafter-device cpu --steps 12 --alone 8"
    file = folder / "found.json"
    code = pipeline.main(
        [*arguments.split(), "--skipped", "2", "--data", str(folder / "texts"), "--json", str(file)]
    )
    content: dict[str, Any] = json.loads(file.read_text())
    return content | {"exit code": code}


def test_both_sides_and_the_pipeline_are_reported(found: dict[str, Any]) -> None:
    assert found["exit code"] == 0
    assert found["mode"] == "eager"
    assert found["target_alone"]["steps"] == found["drafter_alone"]["steps"] == 2 * (8 - 2)
    assert found["pipeline"]["steps"] == 12 - 2
    slower = max(found["target_alone"]["step_ms"], found["drafter_alone"]["step_ms"])
    assert found["against_slower_side"] == pytest.approx(slower / found["pipeline"]["step_ms"])
    assert found["num_devices"] == 1
    assert found["tokens_per_s_per_device"] == found["pipeline"]["tokens_per_s"]


def test_real_documents_of_many_lengths_are_packed(found: dict[str, Any]) -> None:
    assert found["documents_per_batch"] > 1
    assert 0.5 < found["fill"] <= 1
    positions_per_s = 256 / found["pipeline"]["step_ms"] * 1e3
    assert 0.5 * positions_per_s < found["pipeline"]["tokens_per_s"] <= positions_per_s * (1 + 1e-9)


def test_who_waited_is_told_of_the_pipeline_alone(found: dict[str, Any]) -> None:
    elapsed_s = found["pipeline"]["step_ms"] * found["pipeline"]["steps"] / 1e3
    assert found["waits"]["elapsed_s"] == pytest.approx(elapsed_s, rel=0.2)
    assert 0 <= found["waits"]["drafter_for_features_s"] <= found["waits"]["elapsed_s"]
    assert found["advice"]


def test_windows_are_joined_by_their_sums() -> None:
    both = joined(
        [Window(seconds=1.0, steps=10, tokens=100), Window(seconds=3.0, steps=10, tokens=300)]
    )
    assert (both.step_ms, both.tokens_per_s) == (200.0, 100.0)


def test_a_random_target_has_the_shape_that_its_drafter_needs() -> None:
    shape = SHAPES["tiny"]
    targets = [
        random_target(shape, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert targets[0].num_layers == shape.drafter.num_target_layers
    assert targets[0].embedding_VD.shape == (shape.drafter.vocab_size, shape.drafter.hidden_size)
    assert targets[0].taps == shape.drafter.target_layer_ids
    assert targets[0].fingerprint == targets[1].fingerprint != targets[2].fingerprint


def test_the_text_is_the_standard_library_in_pieces_of_many_lengths(tmp_path: Path) -> None:
    lines = write_definitions(tmp_path / "text.jsonl").read_text().splitlines()
    lengths = [len(json.loads(line)["text"]) for line in lines]
    assert len(lengths) > 1000
    assert len(set(lengths)) > 500


def test_the_block_mask_is_timed_in_every_form_that_the_device_can_do(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    forms = ["--form", "launched", "--form", "captured"]
    assert block_mask(["--device", "cpu", "--repeats", "3", *forms, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    launched, captured = found["forms"]
    assert 0 < launched["ms_p10"] <= launched["ms_median"] <= launched["ms_p90"]
    assert "CUDA" in captured["skipped"]
    assert (found["block_tokens"], found["keys"]) == (256, 512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_block_mask_is_timed_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    assert block_mask(["--device", "cuda", "--repeats", "3", "--json", str(file)]) == 0
    assert all(row["ms_median"] > 0 for row in json.loads(file.read_text())["forms"])
