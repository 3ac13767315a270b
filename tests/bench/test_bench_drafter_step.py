"""The drafter-step bench on a CPU: what it reports, and that it runs the trainer's own steps."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_bench import drafter_step
from dflash_bench.drafter_step import Row, Settings, compare, main
from dflash_bench.shapes import SHAPES
from dflash_bench.steps import LR, make_step
from dflash_bench.turns import Subject

COMMAND = "--shape tiny --device cpu --mode eager --mode graphed --steps 6 --turns 2"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bench") / "found.json"
    code = main([*COMMAND.split(), "--json", str(file)])
    content: dict[str, Any] = json.loads(file.read_text())
    return content | {"exit code": code}


def losses_of(numbers: range) -> list[float]:
    """The loss of every step, by hand, from the step's own parts."""
    step = make_step(SHAPES["tiny"], device=torch.device("cpu"))
    losses = []
    for number in numbers:
        step.batch.batch_number.fill_(number)
        step.parts["normal"]()
        losses.append(float(step.loss_sum / step.weight_sum))
        step.set_lr(LR)
        step.parts["update"]()
    return losses


def test_a_report_names_everything_a_reader_needs_to_judge_it(found: dict[str, Any]) -> None:
    for key in ("schema", "device", "torch", "python", "commit", "command", "sizes", "flop"):
        assert key in found
    assert found["case"] == "drafter_step"
    assert found["command"].startswith("python -m dflash_bench.drafter_step --shape tiny")


def test_a_mode_is_reported_with_its_spread_its_share_and_its_start(found: dict[str, Any]) -> None:
    row = found["modes"][0]
    assert row["mode"] == "eager"
    assert row["steps"] == 6
    assert row["step_ms_p10"] <= row["step_ms_median"] <= row["step_ms_p90"]
    assert row["step_p90_over_median"] == row["step_ms_p90"] / row["step_ms_median"]
    assert row["context_tokens_per_s"] == pytest.approx(256e3 / row["step_ms_median"])
    assert row["matrix_share"] == pytest.approx(row["model_tflops"] / row["matrix_tflops"])
    assert row["matrix_share_needed"] < row["matrix_share"]
    assert row["first_step_s"] > row["warm_up"]["warm_up_s"] > 0
    assert row["device_allocs_after_warm_up"] == 0
    assert len(row["turn_ms_medians"]) == 2


def test_a_mode_that_dies_is_a_row_and_a_finding(found: dict[str, Any]) -> None:
    row = found["modes"][1]
    assert row["mode"] == "graphed"
    assert row["error"]["during"] == "prepare"
    assert "CUDA graphs" in row["error"]["message"]
    assert "Traceback" in row["error"]["trace"]
    assert found["exit code"] == 1


def test_first_and_last_loss_are_those_of_the_same_steps_by_hand(found: dict[str, Any]) -> None:
    row = found["modes"][0]
    losses = losses_of(range(row["steps_to_loss_last"]))
    # Another process may split sums over other threads; nothing else differs.
    assert row["loss_first"] == pytest.approx(losses[0], rel=1e-6)
    assert row["loss_last"] == pytest.approx(losses[-1], rel=1e-6)
    assert row["loss_last"] < row["loss_first"]


def test_alone_measures_one_mode_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def measure(subjects: Mapping[str, Callable[[], Subject]], _settings: Settings) -> list[Row]:
        seen.append(list(subjects))
        return [{"mode": mode} for mode in subjects]

    monkeypatch.setattr(drafter_step, "measure", measure)
    settings = Settings(shape="tiny", device="cpu")
    assert compare(["eager", "compiled"], settings, alone=True) == [
        {"mode": "eager"},
        {"mode": "compiled"},
    ]
    compare(["eager", "compiled"], settings, alone=False)
    assert seen == [["eager"], ["compiled"], ["eager", "compiled"]]


def test_a_profile_is_of_one_mode(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*COMMAND.split(), "--profile", str(tmp_path / "kernels.txt")])
    assert stopped.value.code == 2
