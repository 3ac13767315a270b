"""``dflash train`` from the outside: output, files and exit codes."""

import json
import re
from pathlib import Path

import pytest
from tiny_runs import steps_of, write_toml

from dflash.cli.__main__ import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command leaves behind, it leaves in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def toml(place: Path, tmp_path: Path) -> Path:
    return write_toml(tmp_path / "tiny.toml", place)


def test_a_run_ends_with_what_to_do_next(toml: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", str(toml), "--run-dir", "here", "optim.max_steps=8"]) == 0
    shown = capsys.readouterr()
    assert "step 8 of 8; checkpoint here/checkpoints/step-00000008" in shown.out
    assert "next: dflash eval here, dflash export here OUT" in shown.out
    assert re.search(r"^step 4/8 \| loss \d", shown.err, re.MULTILINE)
    assert re.search(r"^step 4/8 .* left \d", shown.err, re.MULTILINE)
    assert len(steps_of(tmp_path / "here")) == 2
    assert main(["train", str(toml), "--run-dir", "here", "optim.max_steps=8"]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_every_event_is_a_line_of_words(toml: Path, capsys: Capture) -> None:
    command = ["train", str(toml), "--run-dir", "here", 'drafter.devices=["cpu","cpu"]']
    assert main([*command, "--max-steps", "2"]) == 0
    assert main([*command, "--max-steps", "4", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().err.splitlines()
    events = [line for line in shown if re.match(r"step \d+ \|", line)]
    names = {line.split("| ")[1].split(":")[0] for line in events}
    assert names >= {"warm_up", "entered", "checkpoint", "waits", "resumed"}
    assert [line for line in events if re.search(r"[{}\[\]]|'\w+'", line)] == []


def test_a_run_past_the_steps_asked_for_says_so(toml: Path, capsys: Capture) -> None:
    command = ["train", str(toml), "--run-dir", "here", "--progress", "none"]
    assert main([*command, "--max-steps", "6"]) == 0
    capsys.readouterr()
    assert main([*command, "optim.max_steps=4"]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first.startswith("step 6, past the 4 steps asked for; checkpoint here/")
    assert "nothing to do: the last step asked for is 4" in more


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume", "nope"],
        ['target.devices=["cuda:99"]'],
        ["target.model=/nowhere/at/all"],
        ['data.train=["/nowhere/rows.jsonl"]'],
    ],
    ids=str,
)
@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_never_began_leaves_no_folder(
    toml: Path, tmp_path: Path, *, arguments: list[str], there: bool
) -> None:
    if there:
        (tmp_path / "runs").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(toml), "--run-dir", "runs/deep/here", *arguments]) > 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_run_folder_is_named_after_the_configuration(toml: Path, tmp_path: Path) -> None:
    assert main(["train", str(toml), "--max-steps", "1", "--progress", "none"]) == 0
    assert (tmp_path / "runs" / "tiny" / "records.jsonl").is_file()


def test_a_run_of_epochs_shows_the_time_that_is_left(place: Path, capsys: Capture) -> None:
    toml = write_toml(Path("epochs.toml"), place, optim={"max_steps": None, "epochs": 1})
    assert main(["train", str(toml)]) == 0
    assert re.search(r"^step 4/\d+ \| .* left \d", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("kind", ["plain", "none"])
def test_json_is_all_there_is_on_stdout(toml: Path, capsys: Capture, kind: str) -> None:
    arguments = ["train", str(toml), "--run-dir", "here", "--max-steps", "5", "--progress", kind]
    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert (summary["step"], summary["num_steps"], summary["signal"]) == (5, 40, None)
    assert summary["checkpoint"] == "here/checkpoints/step-00000005"
    assert summary["waits"]["elapsed_s"] > 0
    assert summary["advice"]
    assert ("step 4" in shown.err) == (kind == "plain")


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    toml: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(toml), "--dry-run", "--run-dir", "here"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "one step: loss",
        "40 steps over",
        "predicted peak",
        "measured peak",
        "mode eager",
    ):
        assert text in shown
    assert main(["train", str(toml), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_steps"] == 40
    assert plan["plans"][0]["device"] == "cpu"
    assert sorted(tmp_path.rglob("*")) == before


def test_tensorboard_gets_every_figure_when_it_is_asked_for(place: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = ("jsonl", "tensorboard")
    toml = write_toml(tmp_path / "tb.toml", place, log={"sinks": sinks}, optim={"max_steps": 20})
    assert main(["train", str(toml), "--run-dir", "here", "--max-steps", "10"]) == 0
    assert main(["train", str(toml), "--run-dir", "here"]) == 0
    written = accumulator.EventAccumulator(str(tmp_path / "here" / "tensorboard"))
    written.Reload()
    losses = {event.step: event.value for event in written.Scalars("step/loss")}
    expected = {r["step"]: r["loss"] for r in steps_of(tmp_path / "here")}
    assert losses == pytest.approx(expected)
    assert sorted(losses) == [4, 8, 12, 16, 20]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["optim.lr=-1", "drafter.block_sise=4"], 2, "did you mean"),
        (['target.devices=["cuda:99"]'], 2, "there is no device cuda:99"),
        (["--progress", "loud"], 2, "--progress loud: must be one of"),
        (["target.model=/nowhere/at/all"], 3, "/nowhere/at/all"),
        (['data.train=["/nowhere/rows.jsonl"]'], 12, "/nowhere/rows.jsonl"),
        (["optim.lr=1e38"], 10, "the loss or the gradient norm is not finite"),
        (["--resume", "/nowhere/run"], 13, "there is no checkpoint folder at /nowhere/run"),
    ],
    ids=str,
)
def test_an_error_is_one_sentence_with_its_exit_code(
    toml: Path, capsys: Capture, *, arguments: list[str], code: int, says: str
) -> None:
    assert main(["train", str(toml), *arguments]) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("error: ") == 1
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_the_folder_of_another_configuration_is_refused(toml: Path, capsys: Capture) -> None:
    assert main(["train", str(toml), "--run-dir", "here", "--max-steps", "1"]) == 0
    capsys.readouterr()
    assert main(["train", str(toml), "--run-dir", "here", "drafter.block_size=8"]) == 13
    shown = capsys.readouterr().err
    assert "contradicts this run: drafter.block_size = 4 there, 8 here" in shown
    assert main(["train", str(toml), "--run-dir", "here", "--resume", "never"]) == 13
    assert "would mix two runs" in capsys.readouterr().err
