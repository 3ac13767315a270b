"""The observer leaves path, environment, hooks and children as they would be without it."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watched_programs import ROOT, diagnosed, watched, written

TOLD = (
    "import os, sys; print(os.environ.get('PYTHONPATH'), os.environ.get('DFLASH_WATCH'), sys.path)"
)
CUSTOM = "import sys; sys.stderr.write('custom\\n'); sys.from_custom = __file__"
SHOWS = "import sys, sitecustomize; sys.stderr.write(f'{sys.from_custom} {sitecustomize}\\n')"
GRANDCHILD = """
import os, subprocess, sys
import torch
if os.fork() == 0:
    sys.exit("a fork of it")
os.wait()
subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=sys.stderr)
"""
CTRL_C = """
import os, signal, sys, time
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # a second one would come now
    print("tidied up", flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("custom", [CUSTOM, f"{CUSTOM}; raise ValueError('its own')", None])
def test_a_sitecustomize_that_was_there_is_still_run(
    custom: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = written(tmp_path, SHOWS)
    if custom is not None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "sitecustomize.py").write_text(custom)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    seen = watched(command)
    assert (seen.code, seen.stderr) == (alone.returncode, alone.stderr)
    assert len(seen.processes) == 1


def test_what_a_program_starts_is_not_observed_and_has_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [*written(tmp_path, GRANDCHILD, small_torch=True), TOLD]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    seen = watched(command)
    assert seen.stderr == alone.stderr
    assert seen.stderr.splitlines()[1].startswith("None None [")
    (process,) = seen.processes
    assert process.torch == "2.13.0+small"


def test_a_python_below_a_shell_is_observed(tmp_path: Path) -> None:
    python, program = written(tmp_path, "import torch", small_torch=True)
    seen = watched(["sh", "-c", f"{python} {program}; {python} -c 'raise SystemExit(4)'"])
    assert [process.torch for process in seen.processes] == ["2.13.0+small", ""]
    assert seen.code == 4


def test_hooks_of_the_program_are_called_as_they_would_be(tmp_path: Path) -> None:
    code = """
import sys, threading
def main_hook(kind, error, trace): print("main", error, file=sys.stderr)
def thread_hook(args): print(args.thread.name, args.exc_value, file=sys.stderr)
sys.excepthook, threading.excepthook = main_hook, thread_hook
import torch
def fail(): raise ValueError("one")
thread = threading.Thread(target=fail, name="w"); thread.start(); thread.join()
thread = threading.Thread(target=sys.exit); thread.start(); thread.join()
raise KeyError("two")
"""
    command = written(tmp_path, code, small_torch=True)
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "w one\n" in alone.stderr
    seen = watched(command)
    assert (seen.code, seen.stderr) == (alone.returncode, alone.stderr)
    failed = seen.processes[0].failed
    assert [(one.is_main, one.text.splitlines()[-1]) for one in failed] == [
        (False, "ValueError: one"),
        (True, "KeyError: 'two'"),
    ]
    assert (failed[0].thread or "").startswith("w (")


def test_a_torch_that_cannot_be_counted_is_told_and_still_runs(tmp_path: Path) -> None:
    command = written(tmp_path, "import torch; print(torch.x)")
    (tmp_path / "torch.py").write_text("__version__, x = '9.9', 1")
    found = diagnosed(command)
    assert found.exit_code == 0
    assert "could not be counted: AttributeError" in found.notes[0]


def words_of_cli(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "dflash.cli.__main__", "diagnose", "watch", "--", *command]


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_goes_to_the_program_once_and_is_reported(times: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words_of_cli(written(tmp_path, CTRL_C)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        for _ in range(times):  # `timeout` signals a program and then its group
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        output, said = process.communicate(timeout=30)
    assert (process.returncode, output) == (7, "tidied up\n")
    assert "Traceback" not in said
    assert "exit code 7" in said
    assert "SIGINT was passed on to it" in said
    assert ends(pid)


def test_a_watcher_that_is_killed_takes_the_program_with_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words_of_cli(written(tmp_path, CTRL_C)), stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    assert ends(pid)


def test_a_terminal_is_the_programs_its_ctrl_c_too(tmp_path: Path) -> None:
    code = f"print('said', input(), flush=True)\n{CTRL_C}"
    command, environment = written(tmp_path, code), {**os.environ, "PYTHONPATH": str(ROOT)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, words_of_cli(command), environment)  # noqa: S606 - no shell
    os.write(terminal, b"hello\n")
    said = b""
    while not said.rstrip().rpartition(b"\n")[2].isdigit():
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1000):
            said += chunk
    except OSError:  # how a terminal ends
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert b"said hello" in said
    assert said.count(b"tidied up") == 1
    assert b"was passed on" not in said  # the terminal gave it to the program, and to it alone
