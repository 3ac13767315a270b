"""``dflash diagnose`` and ``dflash explain`` as a user meets them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from pydantic import TypeAdapter

from dflash.cli.__main__ import main
from dflash.diagnose import select
from dflash.diagnose.findings import Diagnosis, Launch
from dflash.failures import FailureMode, all_modes

HERE = Path(__file__).parent
FAKES = HERE.parent / "diagnose"
Capture = pytest.CaptureFixture[str]
STEPS = """
import torch

def make_step(device):
    layer = torch.nn.Linear(4, 4, device=device)
    return layer, (torch.ones(2, 4, device=device),)

def broken(device):
    def step(x):
        return x @ torch.ones(3)
    return step, (torch.ones(2, 4),)
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Put fake modes in the place of all others; run in a folder of one's own."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.chdir(tmp_path)

    def use(*modes: FailureMode) -> None:
        monkeypatch.setattr(select, "all_modes", lambda: modes)
        monkeypatch.setattr(select, "all_slugs", lambda: tuple(mode.slug for mode in modes))

    return use


@pytest.fixture
def fake() -> Callable[[str], FailureMode]:
    def named(name: str) -> FailureMode:
        import fake_modes

        found: FailureMode = getattr(fake_modes, name)
        return found

    return named


Use = Callable[..., None]
Named = Callable[[str], FailureMode]


def test_a_reproduced_failure_is_exit_one(fakes: Use, fake: Named, capsys: Capture) -> None:
    fakes(fake("NUMBER"), fake("QUIET"))
    assert main(["diagnose", "number"]) == 1
    said = capsys.readouterr()
    assert "!! number: reproduced" in said.out
    assert "one launch decides" in said.out
    assert "verified here: yes" in said.out
    assert "number faulty 0: 3" in said.err


def test_no_line_is_wider_than_78_columns_and_none_has_control_codes(
    fakes: Use, fake: Named, capsys: Capture
) -> None:
    fakes(fake("SEGV"), fake("CUDA"), fake("QUIET"), fake("LEAVE"))
    main(["diagnose", "all", "--trials", "1", "-M", "6", "-N", "2"])
    said = capsys.readouterr()
    assert max(map(len, said.out.splitlines())) <= 78
    assert "\x1b" not in said.out + said.err
    assert "with 6 target(s) and 2 drafter(s): safe here: eager, compiled" in said.out
    assert "choose eager" in " ".join(said.out.splitlines()[-4:])
    assert "target.devices names 1 device" in " ".join(said.out.splitlines()[-2:])


def test_an_inconclusive_mode_is_exit_four(fakes: Use, fake: Named, capsys: Capture) -> None:
    fakes(fake("LEAVE"))
    assert main(["diagnose", "leave", "--trials", "1"]) == 4
    assert "?? leave: inconclusive" in capsys.readouterr().out
    assert main(["diagnose", "leave", "--trials", "1", "--fail-on", "never"]) == 0


def test_a_timeout_below_the_modes_own_shows_no_hang_and_refutes_no_remedy(
    fakes: Use, fake: Named, capsys: Capture
) -> None:
    fakes(fake("HANG"), fake("SLOW"))
    assert main(["diagnose", "hang", "--timeout", "0.5"]) == 4
    assert "?? hang: inconclusive" in capsys.readouterr().out
    assert main(["diagnose", "slow", "--timeout", "0.5"]) == 4
    said = capsys.readouterr().out
    assert "verified here: not run" in said
    assert "no end within 0.5 s, of the 60 s" in said
    assert main(["diagnose", "hang", "--timeout", "2"]) == 1  # longer than the mode's own


def test_a_step_that_a_timeout_ends_is_not_said_to_fail(
    fakes: Use, fake: Named, tmp_path: Path, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_steps.py").write_text("import time\ndef slow(device):\n    time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}:{tmp_path}")
    fakes(fake("STEPPED"))
    assert main(["diagnose", "stepped", "--step", "my_steps:slow", "--timeout", "0.5"]) == 2
    error = capsys.readouterr().err
    assert "my_steps:slow alone, with no failure mode around it, takes more" in error
    assert "fails on its own" not in error


def test_a_child_that_cannot_start_is_inconclusive(
    fakes: Use, fake: Named, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(fake("QUIET"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert main(["diagnose", "quiet", "--trials", "1"]) == 4
    assert "cannot be started" in capsys.readouterr().out


def test_a_surprise_is_a_warning_and_not_an_error(fakes: Use, fake: Named) -> None:
    fakes(fake("QUIET"))  # expected of every torch, and quiet
    assert main(["diagnose", "quiet", "--trials", "1"]) == 0
    assert main(["diagnose", "quiet", "--trials", "1", "--fail-on", "warning"]) == 1


def test_json_on_stdout_is_all_there_is_and_fits_its_schema(
    fakes: Use, fake: Named, capsys: Capture
) -> None:
    fakes(fake("THREAD"))
    assert main(["diagnose", "all", "--trials", "2", "--json", "-"]) == 1
    read = TypeAdapter(Diagnosis).validate_json(capsys.readouterr().out)
    assert read.findings[0].verdict == "reproduced"
    assert read.advice is not None
    assert main(["diagnose", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema) == {"Diagnosis", "RunDiagnosis", "WatchDiagnosis"}
    assert set(schema["Diagnosis"]["properties"]) == set(json.loads(read.model_dump_json()))


def test_reports_are_written_for_machines_and_for_browsers(
    fakes: Use, fake: Named, tmp_path: Path
) -> None:
    fakes(fake("SEGV"), fake("LEAVE"))
    files = {name: tmp_path / name for name in ("a.json", "a.xml", "a.html")}
    words = ["--json", str(files["a.json"]), "--junit", str(files["a.xml"])]
    main(["diagnose", "all", "--trials", "1", *words, "--html", str(files["a.html"])])
    assert json.loads(files["a.json"].read_text())["kind"] == "diagnosis"
    suite = ET.parse(files["a.xml"]).getroot().find("testsuite")  # noqa: S314 - our own file
    assert suite is not None
    counts = ("tests", "failures", "errors", "skipped")
    assert [suite.get(name) for name in counts] == ["2", "1", "1", "0"]
    page = files["a.html"].read_text()
    assert "<svg" in page
    assert "Segmentation fault" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("option", ["--json", "--junit", "--html"])
def test_a_report_that_cannot_be_written_is_said_before_anything_is_launched(
    option: str, fakes: Use, fake: Named, *, capsys: Capture
) -> None:
    fakes(fake("NUMBER"))
    assert main(["diagnose", "number", option, "/nowhere/report"]) == 2
    said = capsys.readouterr()
    assert "error: the report /nowhere/report cannot be written" in said.err
    assert "number faulty" not in said.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_diagnosis_keeps_the_modes_that_are_done(
    fakes: Use, fake: Named, *, signum: int, tmp_path: Path
) -> None:
    done = fake("NUMBER")
    lingers = fake("LINGER")  # which goes on for a minute
    fakes(done, lingers)

    def interrupt(slug: str, launch: Launch) -> None:
        if (slug, launch.variant) == (done.slug, "sound"):
            os.kill(os.getpid(), signum)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIDS", str(tmp_path))
        patch.setattr("dflash.cli.diagnose._talk_of", interrupt)
        assert main(["diagnose", "all", "--json", "found.json"]) == 130
    found = Diagnosis.model_validate_json(Path("found.json").read_text(encoding="utf-8"))
    assert [finding.slug for finding in found.findings] == [done.slug]
    assert not found.complete
    assert found.missing == [lingers.slug]
    assert found.advice is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_unknown_slug_suggests_the_nearest(capsys: Capture) -> None:
    assert main(["diagnose", "fx-trace-rase"]) == 2
    assert "hint: did you mean fx-trace-race?" in capsys.readouterr().err
    assert main(["explain", "futureleak"]) == 2
    assert "hint: did you mean future-leak?" in capsys.readouterr().err


def test_unknown_slugs_are_told_all_at_once_and_beside_all_too(capsys: Capture) -> None:
    assert main(["diagnose", "fx-trace-rase", "future-leak", "qqq", "lable-shift"]) == 2
    error = capsys.readouterr().err
    assert "there is no failure mode 'fx-trace-rase' or 'qqq' or 'lable-shift'" in error
    assert "hint: did you mean fx-trace-race and label-shift?" in error
    assert main(["diagnose", "all", "futureleak"]) == 2
    assert "there is no failure mode 'futureleak'" in capsys.readouterr().err


def test_requiring_a_gpu_without_one_is_exit_three(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["diagnose", "future-leak", "--require-gpu"]) == 3
    assert "--require-gpu" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "said"), [("2.8.1", "is too old"), (None, "not installed")])
def test_without_a_torch_that_will_do_it_is_exit_three(
    version: str | None, said: str, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr("dflash.diagnose.machine.metadata.version", installed)
    assert main(["explain", "future-leak"]) == main(["diagnose", "run", "runs/x"]) == 3
    capsys.readouterr()
    assert main(["diagnose", "all"]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert "hint: pip install" in error


def test_the_list_says_what_runs_here_and_launches_nothing(capsys: Capture) -> None:
    assert main(["diagnose", "--list", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["slug"] for each in listed] == [mode.slug for mode in all_modes()]
    assert main(["diagnose"]) == 0
    shown = capsys.readouterr().out
    assert "future-leak" in shown
    assert max(map(len, shown.splitlines())) <= 78


def test_a_page_is_explained(capsys: Capture) -> None:
    assert main(["explain", "future-leak"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("future-leak: A drafted slot reads")
    places = [text.index(f"\n{name}\n") for name in ("Symptom", "Mechanism", "Remedy", "Sources")]
    assert places == sorted(places)
    assert main(["explain", "future-leak", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["sections"]["remedy"]
    assert page["limit"] == 0.0


def test_a_step_that_fails_on_its_own_is_told_as_its_authors(
    fakes: Use, fake: Named, tmp_path: Path, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}:{tmp_path}")
    fakes(fake("STEPPED"))
    assert main(["diagnose", "stepped", "--step", "my_steps:broken"]) == 2
    error = capsys.readouterr().err
    assert "my_steps:broken fails on its own" in error
    assert "return x @ torch.ones(3)" in error  # their line, in their traceback


def test_a_failure_mode_runs_around_a_users_step(
    fakes: Use, fake: Named, tmp_path: Path, *, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}:{tmp_path}")
    fakes(fake("STEPPED"), fake("QUIET"))
    assert main(["diagnose", "stepped", "--step", "my_steps:make_step"]) == 1
    assert "bad things: 8 things faulty, 0 things remedied" in capsys.readouterr().out
    assert main(["diagnose", "quiet", "--step", "my_steps:make_step"]) == 2
    assert "--step cannot stand in for the program of quiet" in capsys.readouterr().err
    assert main(["diagnose", "stepped", "--step", "my_steps"]) == 2
    assert "is not MODULE:FUNCTION" in capsys.readouterr().err


def test_diagnose_starts_no_cuda_context() -> None:
    code = (
        "import torch; from dflash.diagnose.machine import look; look();"
        "from dflash.failures import all_modes; all_modes();"
        "import sys; sys.exit(torch.cuda.is_initialized())"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], check=False).returncode
        == 0
    )
