"""An evaluation that a stop cuts short is owed, and made first by the run that goes on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    assert_same_tensors,
    checkpoint,
    run,
    steps_of,
    tiny_config,
    wait_for_main,
)

from dflash.config import RunConfig
from dflash.records import EvalRecord, read_records
from dflash.train.evaluation import evaluate


@pytest.fixture(scope="module")
def measuring(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run that decodes prompts before the first step, after 6 and at its end, and its folder."""
    folder = tmp_path_factory.mktemp("measuring")
    (folder / "heldout.txt").write_text("\n".join(f"line {n} of file 99: {n}" for n in range(9)))
    config = tiny_config(
        place,
        data={"heldout": (str(folder / "heldout.txt"),)},
        optim={"max_steps": 12},
        eval={"every_steps": 6, "num_prompts": 2, "max_new_tokens": 24},
        checkpoint={"every_steps": 6},
    )
    run(config, folder / "whole")
    return config, folder / "whole"


def taus_of(run_dir: Path) -> list[tuple[int, list[float | None]]]:
    records = read_records(run_dir / "records.jsonl")
    return [(r.step, r.tau_per_prompt) for r in records if isinstance(r, EvalRecord)]


def manifest_of(run_dir: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


@pytest.mark.parametrize("at", [0, 6, 12])
@pytest.mark.parametrize("block", [1, 4])
def test_a_signal_while_prompts_are_decoded_is_heard_at_the_next_block(
    measuring: tuple[RunConfig, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    at: int,
    block: int,
) -> None:
    config, whole = measuring
    num_evaluations, blocks = [0], []

    def interrupted(*arguments: Any, heartbeat: Any, **options: Any) -> Any:  # noqa: ANN401
        num_evaluations[0] += 1

        def beat() -> None:
            if num_evaluations[0] == 1 + at // 6:
                blocks.append(1)
                if len(blocks) == block:
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_for_main()
            heartbeat()

        return evaluate(*arguments, heartbeat=beat, **options)

    monkeypatch.setattr("dflash.train.boundary.evaluate", interrupted)
    first = run(config, tmp_path)
    monkeypatch.undo()
    assert (first.step, first.signal, first.tau) == (at, signal.SIGTERM, None)
    assert len(blocks) == block, "no block is decoded after the signal"
    assert first.checkpoint == tmp_path / "checkpoints" / f"step-{at:08d}"
    assert manifest_of(tmp_path, at)["metrics"]["tau"] is None
    assert [step for step, _ in taus_of(tmp_path)] == list(range(0, at, 6))

    second = run(config, tmp_path)
    assert (second.step, second.signal) == (12, None)
    assert second.tau is not None
    assert (second.tau_before is None) == (at > 0)
    assert taus_of(tmp_path) == taus_of(whole)
    assert steps_of(tmp_path) == steps_of(whole)
    for step in (6, 12):
        assert manifest_of(tmp_path, step) == manifest_of(whole, step)
    assert_same_tensors(checkpoint(tmp_path, 12), checkpoint(whole, 12))
    best = [folder / "checkpoints" / "best" for folder in (tmp_path, whole)]
    assert best[0].read_text() == best[1].read_text()
    assert run(config, tmp_path).suggestion == "nothing to do: the last step asked for is 12"


def test_an_evaluation_that_is_owed_may_be_cut_short_again(
    measuring: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, whole = measuring

    def stopped(*_arguments: Any, heartbeat: Any, **_options: Any) -> None:  # noqa: ANN401
        os.kill(os.getpid(), signal.SIGINT)
        wait_for_main()
        heartbeat()

    run(config, tmp_path / "first", max_steps=4)
    monkeypatch.setattr("dflash.train.boundary.evaluate", stopped)
    for _ in range(2):
        outcome = run(config, tmp_path / "first")
        assert (outcome.step, outcome.signal) == (6, signal.SIGINT)
        assert outcome.suggestion
    outcome = run(config, tmp_path / "second", resume=str(tmp_path / "first"))
    assert outcome.checkpoint == tmp_path / "second" / "checkpoints" / "step-00000006"
    monkeypatch.undo()
    run(config, tmp_path / "second")
    assert taus_of(tmp_path / "second") == taus_of(whole)[1:]
    assert steps_of(tmp_path / "second") == steps_of(whole)[1:]
    assert_same_tensors(checkpoint(tmp_path / "second", 12), checkpoint(whole, 12))


def test_the_latest_tau_is_told_with_its_step(
    measuring: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, whole = measuring
    outcome = run(config, tmp_path, max_steps=8)
    measured = manifest_of(whole, 6)["metrics"]["tau"]
    assert (outcome.tau, outcome.last_tau, outcome.last_tau_step) == (None, measured, 6)
