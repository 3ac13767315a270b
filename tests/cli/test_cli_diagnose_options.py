"""``dflash diagnose`` ignores no option, and loses no report to a screen that has gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli.__main__ import main
from dflash.failures import all_slugs

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
LATE = """
{"kind": "step", "step": 10, "loss": 1.0, "lr": 0.001, "grad_norm": 1.0}
{"kind": "step", "step": 20, "loss": 1.0, "lr": 0.001, "grad_norm": 1.0, "recompiles": 1}
"""
LIST, ONE, EVERY = "the list of failure modes", "dflash diagnose SLUG", "dflash diagnose all"
RUN = "dflash diagnose run RUN_DIR"
LEVEL = f"with {LIST} or {ONE} or {EVERY}"


@pytest.mark.parametrize(
    ("words", "refused", "hint"),
    [
        ("--html f", f"{LIST} takes no --html", f"--html goes with {ONE} or {EVERY}"),
        (
            "--list --html f --junit g",
            f"{LIST} takes no --junit and no --html",
            f"--junit and --html go with {ONE} or {EVERY}",
        ),
        ("future-leak --list --timeout 9", f"{LIST} takes no --timeout", f"{ONE} or {EVERY}"),
        ("--list --step a:b", f"{LIST} takes no --step", f"--step goes with {ONE} or {EVERY}"),
        ("--list --fail-on error", f"{LIST} takes no --fail-on", f"{RUN} or {ONE} or {EVERY}"),
        ("all --list -M 6", f"{LIST} takes no -M", f"-M goes with {EVERY}"),
        ("future-leak -M 1", f"{ONE} takes no -M", f"-M goes with {EVERY}"),
        ("future-leak --drafters 2", f"{ONE} takes no -N", f"-N goes with {EVERY}"),
        ("run x --require-gpu", f"{RUN} takes no --require-gpu", f"--require-gpu goes {LEVEL}"),
        ("run x --no-require-gpu", f"{RUN} takes no --require-gpu", f"--require-gpu goes {LEVEL}"),
        ("run x --list", f"{RUN} takes no --list", f"--list goes {LEVEL}"),
        ("run x --level standard", f"{RUN} takes no --level", f"--level goes {LEVEL}"),
        ("run x --trials 2", f"{RUN} takes no --trials", f"--trials goes {LEVEL}"),
        ("run x --timeout 2", f"{RUN} takes no --timeout", f"--timeout goes with {ONE}"),
        ("run x --step a:b -N 2", f"{RUN} takes no -N and no --step", f"-N goes with {EVERY}; --s"),
        ("run x --html f", f"{RUN} takes no --html", f"--html goes with {ONE} or {EVERY}"),
        (
            "--schema --json f",
            "dflash diagnose --schema takes no --json",
            f"--json goes with {RUN}",
        ),
        ("all --schema", "dflash diagnose --schema takes no words", f"words go with {RUN}"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_and_said_to_belong_elsewhere(
    words: str,
    refused: str,
    hint: str,
    *,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *words.split()]) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first == f"error: {refused}"
    assert hint in second
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_how_many_launches_a_level_makes(capsys: Capture) -> None:
    def launches(*words: str) -> str:
        assert main(["diagnose", "first-compile-crash", "--list", *words]) == 0
        heads, row = capsys.readouterr().out.splitlines()
        assert heads.split()[-1] == "launches"
        return row.split()[-1]

    assert launches() == "20"
    assert launches("--level", "deep") == "300"
    assert launches("--trials", "7") == "7"


@pytest.mark.parametrize(
    "words",
    ["--json same --html same", "--junit same --html ./same", "--json link --junit folder/../same"],
)
def test_two_reports_of_one_name_are_refused(
    words: str, tmp_path: Path, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("same")
    assert main(["diagnose", "future-leak", *words.split()]) == 2
    one, _, other, _ = words.split()
    assert f"error: {one} and {other} name one file" in capsys.readouterr().err
    assert not (tmp_path / "same").exists()


@pytest.mark.parametrize("option", ["--json", "--step"])
def test_an_empty_value_is_refused(option: str, capsys: Capture) -> None:
    assert main(["diagnose", "fx-trace-race", option, ""]) == 2
    assert f"error: {option} is empty" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [("run . --json f", 141), ("--list --json f", 141)])
def test_a_report_is_written_although_nobody_reads_the_screen(
    words: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_text(LATE.lstrip())
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "dflash.cli.__main__", "diagnose", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (code, b"")
    written = json.loads((tmp_path / "f").read_text(encoding="utf-8"))
    if isinstance(written, list):
        assert [each["slug"] for each in written] == list(all_slugs())
    else:
        assert [each["slug"] for each in written["suffered"]] == ["late-shape"]
