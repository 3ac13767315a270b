"""Before a run is sealed, its target has run once in the very thread that will run it."""

import threading
from pathlib import Path

import pytest
from tiny_runs import run, tiny_config

from dflash.execution import process_seal
from dflash.execution.seal import Seal
from dflash.pipeline.lane import TargetLane


def test_a_target_runs_in_its_own_thread_before_the_seal(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    lane_run, close = TargetLane.run, Seal.close

    def noted_run(self: TargetLane, *arguments: object) -> None:
        happened.append(threading.current_thread().name)
        lane_run(self, *arguments)  # type: ignore[arg-type]

    def noted_close(self: Seal) -> None:
        happened.append("sealed")
        close(self)

    monkeypatch.setattr(TargetLane, "run", noted_run)
    monkeypatch.setattr(Seal, "close", noted_close)
    run(tiny_config(place, optim={"max_steps": 4}), tmp_path / "run")
    assert happened == ["MainThread", "target-0", "sealed", *["target-0"] * 4]
    assert not process_seal().closed
