"""Where ``dflash bench`` puts what it found: files, stdout, and what is kept where one fails."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_samples import error, good, sample

from dflash.cli.__main__ import main
from dflash.measurement import Bench
from dflash_bench.files import bench_json, read_bench
from dflash_bench.session import BenchPlan

Capture = pytest.CaptureFixture[str]
Answer = Callable[[Bench], list[BenchPlan]]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_failed_row_is_exit_one_and_everything_is_written(
    answer: Answer, tmp_path: Path, capsys: Capture
) -> None:
    answer(sample())
    files = ["--json", "a.json", "--markdown", "a.md", "--html", "a.html"]
    assert main(["bench", *files]) == 1
    assert read_bench(tmp_path / "a.json") == sample()
    assert "| graphed" in (tmp_path / "a.md").read_text()
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert "cudagraph-trees" in capsys.readouterr().out
    assert list(tmp_path.glob("*.partial")) == []


def test_json_on_stdout_is_all_there_is_on_stdout(answer: Answer, capsys: Capture) -> None:
    answer(good())
    assert main(["bench", "--json", "-", "--expect", "graphed/eager >= 1.5"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kind"] == "bench"
    assert "ok graphed/eager >= 1.5 is met" in said.err


def test_the_schema_is_of_both_files(capsys: Capture) -> None:
    assert main(["bench", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema.keys() == {"Bench", "Changes"}
    assert "benchmarks" in schema["Bench"]["properties"]


def test_the_list_names_cases_modes_and_shapes(capsys: Capture) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in ("drafter-step", "reduce-overhead", "packing", "tiny", "packed-49k"):
        assert name in listed
    assert max(map(len, listed.splitlines())) <= 78
    assert main(["bench", "--list", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["shapes"]["qwen3-8b-3072"]["token_budget"] == 3072


@pytest.mark.parametrize("lost", ["--json", "--markdown", "--html"])
def test_a_report_that_cannot_be_written_at_the_end_loses_no_other(
    answer: Answer, tmp_path: Path, capsys: Capture, *, lost: str
) -> None:
    answer(good())
    files = {"--json": "a.json", "--markdown": "a.md", "--html": "a.html"}
    words = [
        word for option, name in {**files, lost: "/dev/full"}.items() for word in (option, name)
    ]
    assert main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert "error: the report /dev/full cannot be written: No space left" in said.err
    assert "graphed" in said.out
    kept = {name for option, name in files.items() if option != lost}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_comparison_is_shown_though_its_report_cannot_be_written(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "a.json").write_text(bench_json(good()))
    words = ["a.json", "a.json", "--json", "/dev/full", "--markdown", "a.md"]
    assert main(["bench", "compare", *words]) == 2
    assert "step_ms" in capsys.readouterr().out
    assert (tmp_path / "a.md").exists()


@pytest.mark.parametrize("words", ["bench", "bench compare a b", "diagnose all", "eval x"])
def test_a_json_file_without_a_name_is_refused(words: str, capsys: Capture) -> None:
    assert main([*words.split(), "--json", ""]) == 2
    assert error(capsys) == "error: --json is empty\nhint: name a file; - is stdout\n"


@pytest.mark.parametrize(("option", "key"), [("--list", "shapes"), ("--schema", "Bench")])
def test_what_there_is_may_go_to_a_file(
    tmp_path: Path, capsys: Capture, *, option: str, key: str
) -> None:
    assert main(["bench", option, "--json", "a.json"]) == 0
    assert bool(capsys.readouterr().out) == (option == "--list")  # which is for the screen too
    assert key in json.loads((tmp_path / "a.json").read_text())


def test_json_for_a_stdout_that_is_closed_is_refused_before_anything_is_measured() -> None:
    command = f"{sys.executable} -m dflash.cli.__main__ bench --shape tiny --json - >&-"
    ran = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 2
    assert "error: stdout is closed, so no JSON can be printed" in ran.stderr
    assert "making ready" not in ran.stderr
