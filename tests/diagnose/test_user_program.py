"""A user's step takes the place of a failure mode's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.cli.__main__ import main
from dflash.diagnose.user_program import UserProgram
from dflash.execution import Runner
from dflash.failures import all_modes

DOCS = Path(__file__).parents[2] / "docs" / "diagnose.md"
WITH_STEP = [mode.slug for mode in all_modes() if mode.reproduce_step]


def make_step(device: torch.device) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def step(x: Tensor, factor: float) -> Tensor:
        loss = factor * (x * weight).sum()
        loss.backward()
        return loss

    return step, (torch.ones(3, device=device), 0.5)


def test_a_step_runs_in_the_execution_modes() -> None:
    program = UserProgram(make_step, device="cpu")
    assert list(program.inputs) == ["input 0"]
    runner = Runner(program, "eager")
    runner.warm_up()
    assert program.probe().tolist() == [0.0, 0.0]
    for _ in range(2):
        runner("normal")
    assert program.probe().tolist() == [6.0, 2.0]


def test_the_modes_of_the_issue_take_a_step() -> None:
    assert {"cudagraph-trees", "fx-trace-race"} <= set(WITH_STEP)


@pytest.mark.slow
def test_the_step_of_the_documentation_is_judged_like_the_modes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, rest = DOCS.read_text(encoding="utf-8").partition("```python\n")
    (tmp_path / "documented.py").write_text(f"import torch\n\n{rest.partition('```')[0]}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--step", "documented:make_step", "--json", "-", "--fail-on", "never"]
    assert main(["diagnose", "fx-trace-race", *words]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["verdict"] == finding["expected"]
    assert finding["remedy_verified"] != "no"
