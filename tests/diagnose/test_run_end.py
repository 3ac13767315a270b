"""How a run ended is told where it says so itself, and where nothing of it could."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import run, tiny_config, wait_for_main, write_target, write_texts

from dflash.cli.__main__ import main
from dflash.config import RunConfig
from dflash.diagnose.aftermath import diagnose_run
from dflash.train.evaluation import evaluate

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
DYING = """
import resource, signal, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from tiny_runs import run, tiny_config
from dflash.execution import Runner
place, signum, calls, original = Path(sys.argv[1]), int(sys.argv[2]), [], Runner.__call__
def call_and_die(self, part):
    calls.append(part)
    if len(calls) > 20:
        signal.raise_signal(signum)
    original(self, part)
Runner.__call__ = call_and_die
run(tiny_config(place), place / "run")
"""
CRASH = """Fatal Python error: {0}

Thread 0x00000000000000aa (most recent call first):
  File "/their/queue.py", line 12 in get

Current thread 0x00000000000000bb (most recent call first):
  File "/their/step.py", line 34 in backward
  File "/their/loop.py", line 56 in body
"""


def line(kind: str, step: int, **more: object) -> str:
    told: dict[str, object] = {"kind": kind, "step": step}
    if kind == "step":
        told |= {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0}
    return json.dumps(told | more) + "\n"


def event(name: str, step: int, **detail: object) -> str:
    return line("event", step, name=name, detail=detail)


WARM = event("warm_up", 0, mode="eager")
WAITS = event("waits", 20, elapsed_s=1.0)


def written(folder: Path, *records: str, stacks: str | None = None) -> Path:
    (folder / "records.jsonl").write_text("".join(records))
    if stacks is not None:
        (folder / "stacks.txt").write_text(stacks)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_texts(folder / "texts")
    return folder


def prepared(folder: Path, place: Path) -> Path:
    for name in ("target", "texts"):
        (folder / name).symlink_to(place / name)
    return folder


@pytest.mark.parametrize(
    ("signum", "told"),
    [
        (signal.SIGSEGV, ["died of 'Fatal Python error: Segmentation fault'", "in call_and_die"]),
        (signal.SIGKILL, ["ended without a word after step", "dmesg"]),
    ],
)
def test_a_run_that_a_signal_ended_is_not_ok(
    place: Path, tmp_path: Path, capsys: Capture, *, signum: int, told: list[str]
) -> None:
    folder = prepared(tmp_path, place)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", DYING, str(folder), str(int(signum))]
    ran = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    assert ran.returncode == -signum, ran.stderr.decode()
    (note,) = diagnose_run(folder / "run").notes
    assert all(words in note for words in told), note
    assert main(["diagnose", "run", str(folder / "run")]) == 0
    assert capsys.readouterr().out.startswith(f"?? {folder / 'run'}: no failure mode found\n")
    run(tiny_config(folder), folder / "run")  # the same command goes on, and that is over
    assert diagnose_run(folder / "run").notes == []


def measuring(place: Path, folder: Path) -> RunConfig:
    (folder / "heldout.txt").write_text("\n".join(f"line {n} of file 99: {n}" for n in range(9)))
    return tiny_config(
        place,
        data={"heldout": (str(folder / "heldout.txt"),)},
        optim={"max_steps": 6},
        eval={"every_steps": 6, "num_prompts": 1, "max_new_tokens": 8},
    )


def test_a_run_that_was_stopped_and_one_that_goes_on_to_its_end_are_well(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, num = measuring(place, tmp_path), [0]

    def stopped_at_its_end(*arguments: Any, heartbeat: Any, **options: Any) -> Any:  # noqa: ANN401
        num[0] += 1
        if num[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_main()
        return evaluate(*arguments, heartbeat=heartbeat, **options)

    monkeypatch.setattr("dflash.train.boundary.evaluate", stopped_at_its_end)
    outcome = run(config, tmp_path / "run")
    assert (outcome.step, outcome.signal) == (6, signal.SIGTERM)
    assert diagnose_run(tmp_path / "run").notes == []
    (tmp_path / "run" / "stacks.txt").write_text(CRASH.format("Aborted"))  # of an attempt before
    assert run(config, tmp_path / "run").tau is not None  # which it owed: it makes no step
    assert diagnose_run(tmp_path / "run").notes == []
    run(config, tmp_path / "run")  # nothing to do
    assert diagnose_run(tmp_path / "run").notes == []


@pytest.mark.parametrize(
    "error", ["Segmentation fault", "Aborted", "Bus error", "Floating point exception"]
)
def test_a_fatal_error_is_told_with_the_thread_that_was_current(error: str, tmp_path: Path) -> None:
    folder = written(tmp_path, WARM, line("step", 10), stacks=CRASH.format(error))
    (note,) = diagnose_run(folder).notes
    assert note == (
        f"the process died of 'Fatal Python error: {error}'; its current thread,"
        ' 0x00000000000000bb, was at File "/their/step.py", line 34 in backward; all stacks are in'
        " stacks.txt"
    )


def test_a_fatal_error_outside_of_python_has_no_thread(tmp_path: Path) -> None:
    stacks = CRASH.format("Aborted").replace("Current thread", "Thread")
    folder = written(tmp_path, WARM, line("step", 10), stacks=stacks)
    assert "no thread of Python was current" in diagnose_run(folder).notes[0]


def test_a_watchdog_that_nobody_else_could_tell_of_is_told(tmp_path: Path) -> None:
    stacks = "Timeout (0:05:10)!\nThread 0x00000000000000aa (most recent call first):\n"
    folder = written(tmp_path, WARM, line("step", 10), stacks=stacks)
    assert diagnose_run(folder).notes[0].startswith("the process died of 'Timeout (0:05:10)!'")


def test_a_crash_of_two_compilations_is_still_its_failure_mode(tmp_path: Path) -> None:
    stacks = CRASH.format("Segmentation fault").replace(
        "/their/step", "torch/_dynamo/convert_frame"
    )
    found = diagnose_run(written(tmp_path, WARM, stacks=stacks))
    assert [each.slug for each in found.suffered] == ["first-compile-crash"]
    assert "convert_frame.py" in found.notes[0]


RESUMED = event("resumed", 20, checkpoint="step-00000020")
SAVED = event("checkpoint", 20, folder="step-00000020")
STEP = line("step", 20)


@pytest.mark.parametrize(
    ("records", "silent"),
    [
        ([WARM, STEP, SAVED, WAITS], True),
        ([WARM, STEP, SAVED, WAITS, event("stopped", 20, signal=15)], True),
        ([WARM, STEP], False),
        ([WARM, STEP, SAVED], False),
        ([WARM, STEP, SAVED, WAITS, RESUMED], False),  # killed while it warmed up
        ([WARM, STEP, SAVED, WAITS, RESUMED, WARM, line("step", 30)], False),
        ([WARM, STEP, SAVED, WAITS, RESUMED, WARM, line("step", 30), WAITS], True),
    ],
)
def test_the_last_attempt_has_an_end_or_ended_without_a_word(
    records: list[str], *, silent: bool, tmp_path: Path
) -> None:
    notes = diagnose_run(written(tmp_path, *records)).notes
    assert [note.startswith("it ended without a word after step") for note in notes] == (
        [] if silent else [True]
    )


@pytest.mark.parametrize(
    ("chosen", "silent"),
    [
        ({"num_steps": 20, "command": []}, True),
        ({"num_steps": 40, "command": []}, False),
        ({"num_steps": 40, "command": ["train", "x.toml", "--max-steps", "20"]}, True),
        ({"num_steps": 40, "command": ["train", "x.toml", "--max-steps=30"]}, False),
        ("torn", False),
    ],
)
def test_a_run_that_saved_its_last_step_was_done(
    chosen: object, *, silent: bool, tmp_path: Path
) -> None:
    (tmp_path / "environment.json").write_text(json.dumps({"run": chosen}))
    found = diagnose_run(written(tmp_path, WARM, STEP, SAVED))
    assert (found.notes == []) == silent


def test_an_error_that_the_run_told_itself_is_told_once(tmp_path: Path) -> None:
    died = event("died", 20, error="HangError: no thread made progress", traceback="")
    stacks = CRASH.format("Aborted")
    folder = written(tmp_path, WARM, STEP, died, stacks=stacks)
    assert diagnose_run(folder).notes == [
        "it ended after step 20 with HangError: no thread made progress"
    ]
