"""Where output goes may be a pipe, a link, full, closed or of another encoding; nothing is lost."""

import errno
import io
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash.cli.__main__ import main
from dflash.cli.crash import report_crash
from dflash.cli.output import check_reports, check_writable, print_json_text, write_report
from dflash.cli.reports import Reports
from dflash.diagnose.findings import Diagnosis
from dflash.environment import environment
from dflash.errors import UsageError

ROOT = Path(__file__).parents[2]
WORDS = [sys.executable, "-m", "dflash.cli.__main__"]


def dflash(*words: str | bytes, **more: object) -> "subprocess.CompletedProcess[bytes]":
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}  # type: ignore[dict-item]
    arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environ, **more}
    return subprocess.run([*WORDS, *words], check=False, timeout=120, **arguments)  # type: ignore[call-overload,no-any-return]


def test_a_pipe_takes_a_report_and_stays_one(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_report(pipe, "all of it")
    reader.join(20)
    assert read == ["all of it"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, *, there: bool) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    if there:
        real.write_text("old")
    link.symlink_to(real)
    check_writable(link)
    write_report(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_a_file_of_the_user_that_is_called_partial_stays(tmp_path: Path) -> None:
    mine = tmp_path / "found.json.partial"
    mine.write_text("mine")
    check_writable(tmp_path / "found.json")
    write_report(tmp_path / "found.json", "{}")
    assert mine.read_text() == "mine"


def test_two_reports_in_one_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    check_reports({"--json": tmp_path / "a", "--html": tmp_path / "b", "--junit": None})
    for other in ("a", "./a", "link"):
        with pytest.raises(UsageError, match="--json and --html name one file"):
            check_reports({"--json": tmp_path / "a", "--html": tmp_path / other})


class Gone(io.StringIO):
    """A screen whose reader has left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_files_are_written_although_nobody_reads_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Diagnosis(
        torch="2.13.0",
        level="quick",
        environment=environment(with_torch=False),
        findings=[],
        complete=False,
        missing=["late-shape"],
    )
    files = [tmp_path / name for name in ("f.json", "f.xml", "f.html")]
    reports = Reports(str(files[0]), *files[1:])
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        Reports("-", *files[1:]).give(found)
    assert all(file.exists() for file in files[1:])
    reports.give(found)  # nothing to say on the screen
    assert json.loads(files[0].read_text())["missing"] == ["late-shape"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_on_stdout_is_json_in_every_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"żółw": "🙂 \\ \n"}
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding=encoding)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", screen)
        print_json_text(json.dumps(value, ensure_ascii=False))
        screen.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == value


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_a_sentence(unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        ran = dflash("--help", stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    assert ran.returncode == 2
    assert ran.stderr.decode().splitlines()[0] == (
        "error: what was to be printed cannot be written: No space left on device"
    )
    assert b"Traceback" not in ran.stderr


def test_a_full_disk_that_is_not_stdout_s_is_not_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def full(_argv: list[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write to any file does

    monkeypatch.setattr("dflash.cli.__main__._dispatch", full)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert main(["train"]) == 70
    assert "what was to be printed" not in capfd.readouterr().err


def test_a_closed_stdout_is_nobody_s_error() -> None:
    command = 'exec "$@" >&-'
    ran = subprocess.run(
        ["/bin/sh", "-c", command, "sh", *WORDS, "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_names_that_stdout_cannot_spell_are_escaped(tmp_path: Path) -> None:
    words = ("config", "check", str(tmp_path / "żółw.toml"))
    ran = dflash(*words, env={"PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 2
    assert b"Traceback" not in ran.stderr


def test_an_argument_that_is_no_utf_8_reaches_a_watched_program_and_the_report(
    tmp_path: Path,
) -> None:
    out = tmp_path / "found.json"
    words = ("diagnose", "watch", "--json", str(out), "--", "/bin/sh", "-c", "exit 7", "x", b"\xff")
    ran = dflash(*words, cwd=tmp_path)
    assert ran.returncode == 7, ran.stderr
    assert json.loads(out.read_text())["command"][-1] == "\\udcff"
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_crash_file_holds_what_is_no_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report_crash(ValueError("caf\udce9"), ["run", "\udcff"])
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".txt"
    assert "ValueError: caf\\udce9" in file.read_text()


@pytest.mark.parametrize("words", [["env"], ["diagnose"], ["explain", "late-shape"]])
def test_a_torch_that_cannot_be_imported_is_missing_and_no_bug(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    broken = 'raise OSError("libcudart.so.12: cannot open shared object file")\n'
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ran = dflash(*words, env={"PYTHONPATH": path}, cwd=tmp_path)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.decode().startswith(
        "error: torch is installed but cannot be imported: libcudart.so.12: cannot open"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["torch"]
