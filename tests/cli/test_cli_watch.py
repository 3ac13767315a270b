"""``dflash diagnose watch`` as a user meets it: words, exit codes, reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli.__main__ import main
from dflash.diagnose.findings import WatchDiagnosis

Capture = pytest.CaptureFixture[str]
ECHO = "import sys; print(sys.argv[1:])"
FX = "Detected that you are using FX to symbolically trace a dynamo-optimized function"
FAILING = f"""
import sys, threading
def fail(): raise RuntimeError({FX!r})
thread = threading.Thread(target=fail)
thread.start(), thread.join()
print("went on")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("before", [["--"], []])
def test_words_of_the_program_are_its_own(
    before: list[str], capfd: Capture, tmp_path: Path
) -> None:
    words = ["--help", "--json", "-", "--", "--stall", "x"]
    assert main(["diagnose", "watch", *before, sys.executable, "-c", ECHO, *words]) == 0
    said = capfd.readouterr()
    assert said.out == f"{words}\n"
    assert "ok no failure mode was seen" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program_code", "fail_on", "expected"),
    [(0, "error", 1), (3, "error", 1), (0, "never", 0), (3, "never", 3)],
)
def test_a_finding_is_exit_one_else_the_programs_own(
    program_code: int, fail_on: str, *, expected: int, capfd: Capture
) -> None:
    command = [sys.executable, "-c", FAILING, str(program_code)]
    assert main(["diagnose", "watch", "--fail-on", fail_on, "--", *command]) == expected
    said = capfd.readouterr()
    assert said.out == "went on\n"
    assert "!! fx-trace-race" in said.err
    assert f"exit code {program_code} after" in said.err
    assert "dflash explain fx-trace-race" in said.err
    report = said.err[said.err.index("watched ") :]
    assert max(map(len, report.splitlines())) <= 78


def test_a_program_that_a_signal_ended_is_told_as_shells_do(capfd: Capture) -> None:
    assert main(["diagnose", "watch", "--", "sh", "-c", "kill -TERM $$"]) == 128 + 15
    assert "ended by SIGTERM" in capfd.readouterr().err


def test_json_on_stdout_is_all_there_is_and_fits_its_schema(capfd: Capture, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, "3"]
    assert main(["diagnose", "watch", "--json", "-", "--", *command]) == 1
    said = capfd.readouterr()
    found = WatchDiagnosis.model_validate_json(said.out)
    assert (found.exit_code, found.command) == (3, command)
    assert [each.slug for each in found.suffered] == ["fx-trace-race"]
    assert "went on\n" in said.err
    file = tmp_path / "found.json"
    assert main(["diagnose", "watch", "--json", str(file), "--", *command]) == 1
    assert capfd.readouterr().out == "went on\n"
    assert WatchDiagnosis.model_validate_json(file.read_text()).suffered == found.suffered
    assert main(["diagnose", "--schema"]) == 0
    schema = json.loads(capfd.readouterr().out)["WatchDiagnosis"]
    assert set(schema["properties"]) == set(json.loads(found.model_dump_json()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["watch"], "dflash diagnose watch needs a program to watch"),
        (["watch", "--"], "dflash diagnose watch needs a program to watch"),
        (["watch", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["watch", "--", "/"], "/ cannot be run: Permission denied"),
        (["watch", "--json", "/nowhere/x", "--", "echo", "hi"], "the report /nowhere/x cannot be"),
        (["--json", "x", "watch", "--", "echo", "hi"], "options of dflash diagnose watch go"),
    ],
)
def test_what_cannot_be_watched_is_exit_two(words: list[str], told: str, capfd: Capture) -> None:
    assert main(["diagnose", *words]) == 2
    said = capfd.readouterr()
    assert f"error: {told}" in said.err
    assert "hint: " in said.err
    assert said.out == ""


def test_the_help_knows_of_it_and_does_not_wait_for_torch(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    assert "diagnose watch" in capsys.readouterr().out
    assert main(["diagnose", "--help"]) == 0
    assert "dflash diagnose watch" in capsys.readouterr().out
    code = (
        "import sys; from dflash.cli.__main__ import main; main(['diagnose', 'watch', '--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert asked.returncode == 0
    assert b"--kill-on-stall" in asked.stdout
