"""A finished run is read for what it suffered from, and a healthy one has nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import events_of, run, steps_of, tiny_config, write_target, write_texts

from dflash.cli.__main__ import main
from dflash.config import RunConfig
from dflash.diagnose.aftermath import diagnose_run
from dflash.diagnose.finished import FinishedRun
from dflash.diagnose.run_folder import read_run
from dflash.errors import UsageError
from dflash.execution import Runner
from dflash.failures import FailureMode, all_modes
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.watch import Watch
from dflash.records import EvalRecord, EventRecord, RecordWriter, StepRecord, read_records

ROOT = Path(__file__).parents[2]
FX = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
Capture = pytest.CaptureFixture[str]


def prepared(place: Path) -> RunConfig:
    """A tiny run's target and texts, and the configuration that uses them."""
    write_target(place / "target")
    write_texts(place / "texts")
    return tiny_config(place)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("healthy")
    run(prepared(place), place / "run")
    return place / "run"


def test_a_healthy_run_has_nothing(healthy: Path, capsys: Capture) -> None:
    found = diagnose_run(healthy)
    assert (found.suffered, found.notes) == ([], [])
    assert main(["diagnose", "run", str(healthy)]) == 0
    records = healthy / "records.jsonl"
    before = records.read_text()
    assert main(["diagnose", "run", str(healthy), "--json", str(records)]) == 2
    assert records.read_text() == before
    assert "nothing found" in capsys.readouterr().out


def test_records_count_what_was_compiled_and_captured_between_them(healthy: Path) -> None:
    for record in steps_of(healthy):
        assert record["recompiles"] == record["captures"] == 0


def dying(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the third call of every runner raise *error*."""
    calls, original = [0], Runner.__call__

    def call(self: Runner, part: str) -> None:
        calls[0] += 1
        if calls[0] > 8:
            raise error
        original(self, part)

    monkeypatch.setattr(Runner, "__call__", call)


def test_a_run_that_died_says_of_what_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    dying(monkeypatch, RuntimeError(FX))
    config = prepared(tmp_path)
    with pytest.raises(Exception, match="using FX"):
        run(config, tmp_path / "run")
    (died,) = events_of(tmp_path / "run", "died")
    assert FX in died.detail["error"]
    assert "in call" in died.detail["traceback"]
    found = diagnose_run(tmp_path / "run")
    assert [each.slug for each in found.suffered] == ["fx-trace-race"]
    assert any(FX in line for line in found.suffered[0].evidence)
    assert main(["diagnose", "run", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "!! fx-trace-race" in said
    assert "remedy" in said
    assert main(["diagnose", "run", str(tmp_path / "run"), "--json", "-", "--fail-on=never"]) == 0
    assert json.loads(capsys.readouterr().out)["suffered"][0]["slug"] == "fx-trace-race"


def test_a_death_that_was_resumed_from_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared(tmp_path)
    with monkeypatch.context() as broken:
        dying(broken, RuntimeError(FX))
        with pytest.raises(Exception, match="using FX"):
            run(config, tmp_path / "run")
    run(config, tmp_path / "run")
    assert diagnose_run(tmp_path / "run").suffered == []


@pytest.mark.parametrize("mode", [m for m in all_modes() if m.detect], ids=lambda m: m.slug)
def test_no_detector_fires_on_a_healthy_run(mode: FailureMode, healthy: Path) -> None:
    assert mode.detect is not None
    assert list(mode.detect(read_run(healthy))) == []


def step(number: int, **more: float) -> StepRecord:
    return StepRecord(step=number, loss=1.0, lr=1e-3, grad_norm=1.0, **more)


def test_what_an_evaluation_disturbs_is_left_out() -> None:
    records = (step(10), step(20), measured(20, 1.0), step(30), step(40))
    pairs = FinishedRun(records=records).undisturbed
    assert [(before.step, after.step) for before, after in pairs] == [(30, 40)]


def measured(number: int, tau: float) -> EvalRecord:
    return EvalRecord(
        step=number, tau=tau, tau_per_prompt=[], accepted_per_position=[], num_prompts=1,
        tokens_per_s_drafter=1.0, max_new_tokens=8,
    )  # fmt: skip


def test_what_is_compiled_between_records_came_late(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        for record in (step(10, recompiles=5), step(20), step(30, recompiles=1, captures=2)):
            writer.write(record)
    (late,) = diagnose_run(tmp_path).suffered
    assert late.slug == "late-shape"
    assert len(late.evidence) == 1
    assert late.evidence[0].startswith("step 30: 1 compilations, 2 captures")


def test_a_published_run_was_healthy() -> None:
    records = ROOT / "docs" / "measurements" / "data" / "smollm2-records.jsonl"
    run = FinishedRun(records=tuple(read_records(records)))
    assert [m.slug for m in all_modes() if m.detect and list(m.detect(run))] == []


def test_a_folder_without_a_run_is_said_so(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(UsageError, match="is no run folder"):
        read_run(tmp_path / "nowhere")
    assert main(["diagnose", "run"]) == 2
    assert "takes one RUN_DIR" in capsys.readouterr().err


def test_a_run_that_ended_before_its_first_record_still_has_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "stacks.txt").write_text(f"Fatal Python error\n{FX}\n")
    found = diagnose_run(tmp_path)
    assert [each.slug for each in found.suffered] == ["fx-trace-race"]
    assert found.notes == ["it has no records: it ended before its first"]


def test_events_are_text_too(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        writer.write(EventRecord(step=3, name="said", detail={"what": "one\ntwo"}))
    assert list(read_run(tmp_path).lines_with("two")) == ["two"]


def test_a_crash_leaves_its_stacks_in_the_run_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path;"
        f"from {Watch.__module__} import Watch; from {Lifeline.__module__} import Lifeline\n"
        "with Watch(Lifeline(), limit_s=60, stacks_file=Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)"
    )
    stacks = tmp_path / "stacks.txt"
    subprocess.run([sys.executable, "-c", code, str(stacks)], cwd=ROOT, check=False)
    assert "Segmentation fault" in stacks.read_text()
