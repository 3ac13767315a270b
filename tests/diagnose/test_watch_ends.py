"""How a watched program ended decides what is said of it, and its own code is passed on."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from watched_programs import ROOT, run_cli

from dflash.diagnose.process_group import can_be_seen

BROKEN_TORCH = 'raise OSError("libcudart.so.12: cannot open shared object file")'
REASON = "torch cannot be imported: OSError: libcudart.so.12: cannot open shared object file"


def told(said: bytes) -> str:
    """What was said, in one line."""
    return " ".join(said.decode().split())


def test_a_program_that_a_signal_ended_is_not_ok() -> None:
    crash = "import ctypes, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    seen = run_cli("--", sys.executable, "-c", f"{crash}; ctypes.string_at(0)")
    assert seen.returncode == 128 + signal.SIGSEGV
    assert "?? no failure mode was seen, but it died of SIGSEGV" in told(seen.stderr)
    assert "ok no failure" not in told(seen.stderr)


@pytest.mark.skipif(not can_be_seen(), reason="a stall is read from /proc")
def test_a_program_that_was_ended_for_its_stall_is_not_ok() -> None:
    seen = run_cli("--stall", "0.7", "--kill-on-stall", "--", "sleep", "60")
    assert seen.returncode == 5
    assert "?? no failure mode was seen, but it stood still and was ended" in told(seen.stderr)


def test_a_program_whose_exit_code_is_an_error_is_not_ok() -> None:
    seen = run_cli("--", "sh", "-c", "exit 3")
    assert seen.returncode == 3
    assert "?? no failure mode was seen, but its exit code is 3" in told(seen.stderr)


def test_a_program_that_lost_a_thread_and_ended_with_0_is_not_ok() -> None:
    worker = (
        "import threading, torch; t = threading.Thread(target=int, args=('x',), name='drafter-0')"
    )
    seen = run_cli("--", sys.executable, "-c", f"{worker}; t.start(); t.join()")
    assert seen.returncode == 0
    said = told(seen.stderr)
    assert "?? no failure mode was seen, but an exception ended thread drafter-0 (" in said
    assert "): ValueError: invalid literal for int()" in said


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals here")
def test_a_program_that_a_real_time_signal_ended_has_its_code() -> None:
    seen = run_cli("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 35)")
    assert seen.returncode == 128 + 35
    assert "it died of signal 35" in told(seen.stderr)


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("broken", [BROKEN_TORCH, "import no_such_module", "1 / 0"])
def test_without_a_torch_that_can_be_imported_the_program_is_run_and_that_is_said(
    broken: str, *, code: int, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = ["sh", "-c", f"echo hi; exit {code}"]
    seen = run_cli("--json", str(tmp_path / "found.json"), "--", *command, PYTHONPATH=path)
    assert (seen.returncode, seen.stdout) == (code, b"hi\n")
    said = told(seen.stderr)
    assert f"exit code {code} after" in said
    assert "?? nothing could be diagnosed, since torch cannot be imported: " in said
    if broken == BROKEN_TORCH:
        assert REASON in said
    assert "no failure mode" not in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["exit_code"], found["suffered"]) == (code, [])
    assert found["undiagnosed"].startswith("torch cannot be imported: ")
