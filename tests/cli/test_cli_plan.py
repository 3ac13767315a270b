"""``dflash train --dry-run --plan``: memory of every device; no GPU, no weights and no data."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from dflash.cli.__main__ import main
from dflash.config import to_toml

ROOT = Path(__file__).parents[2]
ORIGINAL = "configs/original-6x2.toml"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(*arguments: str) -> int:
    return main(["train", ORIGINAL, "--dry-run", "--plan", *arguments])


def test_the_original_layout_fits_on_its_own_cards_and_on_h200s(capsys: Capture) -> None:
    assert plan() == 0
    shown = capsys.readouterr().out
    assert "cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5 each" in shown
    assert "cuda:6, cuda:7 each" in shown
    assert "8192 anchors a batch; memory: 139.8 GiB a GPU (an H200)" in shown
    assert shown.count("of 139.800: fits") == 2
    assert plan("--device-gib", "95") == 0
    assert plan("execution.activation_checkpointing=false") == 0


def test_a_plan_that_fits_nowhere_is_printed_and_refused(capsys: Capture) -> None:
    assert plan("--device-gib", "80", "execution.activation_checkpointing=false") == 11
    shown = capsys.readouterr()
    assert "of 80.000: too large" in shown.out
    assert "error: the run cannot fit: cuda:6 needs" in shown.err
    assert "execution.activation_checkpointing = true -> " in shown.err
    assert "data.token_budget = 24576 -> " in shown.err
    assert "Traceback" not in shown.err


def test_json_carries_every_figure(capsys: Capture) -> None:
    assert plan("--device-gib", "20", "--json") == 11
    seen = json.loads(capsys.readouterr().out)
    assert [device["device"] for device in seen["devices"]] == [f"cuda:{n}" for n in range(8)]
    for device in seen["devices"]:
        assert device["predicted_bytes"] == sum(device["items"].values())
        assert device["available_bytes"] == 20 * 2**30
        assert device["state"] == "too large"
    assert "not enough alone" in seen["advice"]


def test_a_run_on_the_cpu_has_a_plan_without_a_limit(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copy(place / "target" / "config.json", tmp_path)
    config = tiny_config(place, target={"model": str(tmp_path)}, data={"train": ("/nowhere",)})
    (tmp_path / "cpu.toml").write_text(to_toml(config))
    assert main(["train", str(tmp_path / "cpu.toml"), "--dry-run", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "cpu" in shown
    assert "predicted peak\n" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--plan"], 2, "--plan trains nothing: it belongs to --dry-run"),
        (["--dry-run", "--device-gib", "80"], 2, "--device-gib belongs to --dry-run --plan"),
        (["--dry-run", "--plan", "target.model=/nowhere"], 3, "there is no such file or folder"),
        (["--dry-run", "--plan", "target.model=configs"], 3, "is enough for a plan"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(
    capsys: Capture, *, arguments: list[str], code: int, says: str
) -> None:
    assert main(["train", ORIGINAL, *arguments]) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""


def test_weights_are_asked_for_once_training_wants_them(capsys: Capture, tmp_path: Path) -> None:
    here = ['target.devices=["cpu"]', 'drafter.devices=["cpu"]', "precision.compute=fp32"]
    assert main(["train", ORIGINAL, "--run-dir", str(tmp_path / "run"), *here]) == 3
    assert "configs/targets/Qwen3-8B holds no *.safetensors" in capsys.readouterr().err
