"""A watched program runs as it would alone, and is told what it suffered from."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from watched_programs import (
    CAPTURING,
    FX,
    HEALTHY,
    ROOT,
    diagnosed,
    run_cli,
    slugs,
    watched,
    written,
)

from dflash.diagnose.verdicts import diagnose_watched
from dflash.diagnose.watch import KEPT_BYTES, Plan, watch
from dflash.errors import UsageError
from dflash.failures import all_modes

FLAG_OF_ALL_THREADS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
TRACED = """
import threading, torch
step = torch.compile(lambda x: x + 1, backend="eager")
step(torch.ones(2))
tracing, over = threading.Event(), threading.Event()
class Slow(torch.nn.Module):
    def forward(self, x):
        tracing.set(), over.wait(20)
        return x
tracer = threading.Thread(target=lambda: torch.fx.symbolic_trace(Slow()))
tracer.start(), tracing.wait(20)
worker = threading.Thread(target=lambda: step(torch.ones(2)), name="drafter-1")
worker.start(), worker.join()
over.set(), tracer.join()
"""
CRASHING = """
import faulthandler, resource, sys, threading, time, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
num_threads = int(sys.argv[1])
begun = threading.Barrier(num_threads)
def crash(module, inputs):
    time.sleep(1.0)  # the other one waits for the compiler's lock
    faulthandler._sigsegv()
def compile_one():
    begun.wait()
    torch.compile(lambda x: x + 1, backend=crash)(torch.ones(2))
others = [threading.Thread(target=compile_one) for _ in range(num_threads - 1)]
[other.start() for other in others]
compile_one()
"""
RAISING = """
import sys, threading, torch
def fail(*captures):
    for _ in range(len(captures)):
        torch.cuda.CUDAGraph().capture_begin()
    raise RuntimeError(sys.argv[1])
def quietly():
    torch.cuda.CUDAGraph().capture_begin()
threads = {"alone": [(fail, "one")], "beside": [(quietly,), (fail,)]}[sys.argv[2]]
for number, (target, *arguments) in enumerate(threads):
    thread = threading.Thread(target=target, args=arguments, name=f"w-{number}")
    thread.start(), thread.join()
"""


def test_a_healthy_program_runs_as_it_would_alone_and_has_nothing(tmp_path: Path) -> None:
    command = written(tmp_path, HEALTHY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(command, capture_output=True, check=True, env=environment)
    report = tmp_path / "found.json"
    seen = run_cli("--json", str(report), "--", *command)
    assert (seen.returncode, seen.stdout) == (0, alone.stdout)
    assert seen.stderr.startswith(alone.stderr)
    assert b"ok no failure mode was seen" in seen.stderr
    said = seen.stderr[len(alone.stderr) :].decode()
    assert max(map(len, said.splitlines())) <= 78
    graphs = int(alone.stdout.split(b"graphs ")[1].split(b"\n")[0])
    found = report.read_text()
    assert f'"compiled_graphs": {graphs},' in found
    assert f'"torch": "{torch.__version__}"' in found


@pytest.mark.skipif(not FLAG_OF_ALL_THREADS, reason="torch keeps the flag by thread")
def test_a_call_that_meets_another_threads_trace_is_seen(tmp_path: Path) -> None:
    found = diagnosed(written(tmp_path, TRACED))
    assert slugs(found) == ["fx-trace-race"]
    assert FX in found.suffered[0].evidence[0]
    assert found.exit_code == 0  # a thread's death is not the program's


def test_whoever_traces_compiled_code_itself_has_no_race(tmp_path: Path) -> None:
    code = "import torch; f = torch.compile(torch.nn.ReLU()); torch.fx.symbolic_trace(f)"
    found = diagnosed(written(tmp_path, code))
    assert (slugs(found), found.exit_code) == ([], 1)


@pytest.mark.parametrize(("threads", "expected"), [(2, ["first-compile-crash"]), (1, [])])
def test_a_crash_is_the_compilers_where_two_threads_are_in_it(
    threads: int, expected: list[str], tmp_path: Path
) -> None:
    found = diagnosed([*written(tmp_path, CRASHING), str(threads)])
    assert (found.exit_code, found.signal) == (None, "SIGSEGV")
    assert slugs(found) == expected


@pytest.mark.parametrize(("how", "expected"), [("beside", ["capture-race"]), ("alone", [])])
def test_an_error_of_capturing_is_a_race_where_another_thread_captured(
    how: str, expected: list[str], tmp_path: Path
) -> None:
    command = [*written(tmp_path, RAISING, small_torch=True), CAPTURING, how]
    assert slugs(diagnosed(command)) == expected


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("FailOnRecompileLimitHit", ["worker-config-lost"]),
        ("Offset increment outside graph capture encountered", ["rng-in-capture"]),
        (
            "accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
            ["missing-step-mark"],
        ),
        (f"{FX} x", ["fx-trace-race"]),
        ("cannot import name 'x' from partially initialized module 'torch'", []),
        ("no such key in get_object, skipped", []),
    ],
)
def test_what_ends_a_thread_is_known_by_its_words(
    raised: str, expected: list[str], tmp_path: Path
) -> None:
    command = [*written(tmp_path, RAISING, small_torch=True), raised, "beside"]
    assert slugs(diagnosed(command)) == expected


def test_what_the_main_thread_dies_of_is_no_lost_setting(tmp_path: Path) -> None:
    code = "import torch\nraise RuntimeError('FailOnRecompileLimitHit')"
    found = diagnosed(written(tmp_path, code, small_torch=True))
    assert (slugs(found), found.exit_code) == ([], 1)


def test_words_on_stdout_are_data_and_no_evidence(tmp_path: Path) -> None:
    assert slugs(diagnosed(written(tmp_path, f"print({FX!r})"))) == []


def test_a_failure_that_was_caught_and_printed_is_seen(tmp_path: Path) -> None:
    code = f"import traceback\ntry: raise RuntimeError({FX!r})\nexcept RuntimeError:"
    found = diagnosed(written(tmp_path, f"{code} traceback.print_exc()"))
    assert (slugs(found), found.exit_code) == (["fx-trace-race"], 0)


def test_a_program_without_python_keeps_its_exit_code() -> None:
    found = diagnosed(["sh", "-c", "exit 3"])
    assert (found.exit_code, found.suffered, found.processes) == (3, [], [])
    assert "only its stderr was read" in found.notes[0]


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    found = diagnosed(["sh", "-c", f"sleep 60 & echo $! > {pid_file}"])
    assert found.exit_code == 0
    assert "processes that it had left behind were ended" in found.notes
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_beginning_and_the_end_of_a_long_stderr_are_kept(tmp_path: Path) -> None:
    line = "x" * 1023
    code = f"import sys\nfor n in range({3 * KEPT_BYTES >> 10}): print('{line}', file=sys.stderr)"
    code = f"import sys; print('first', file=sys.stderr)\n{code}\nprint('last', file=sys.stderr)"
    found = watched(written(tmp_path, code))
    assert found.stderr.startswith("first\n")
    assert found.stderr.endswith("last\n")
    assert found.lost_bytes > 0
    written_bytes = len("first\nlast\n") + (3 * KEPT_BYTES >> 10) * 1024
    assert len(found.stderr.encode()) - 1 + found.lost_bytes == written_bytes
    assert "in the middle of its stderr" in "\n".join(diagnose_watched(found).notes)


def test_nothing_and_what_is_nothing_cannot_be_watched(tmp_path: Path) -> None:
    for command, told in [([], "needs a program"), (["no-such-program"], "no program"),
                          ([str(tmp_path)], "cannot be run")]:  # fmt: skip
        with pytest.raises(UsageError, match=told) as error:
            watch(command, plan=Plan())
        assert error.value.hint


def test_output_comes_while_the_program_runs(tmp_path: Path) -> None:
    code = "import sys, time; print('now', file=sys.stderr); time.sleep(60)"
    words = ["-m", "dflash.cli.__main__", "diagnose", "watch", "--", *written(tmp_path, code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"now\n"
        begun = time.monotonic()
        process.terminate()
        said = process.stderr.read().decode()
        assert process.wait() == 128 + 15
        assert "ended by SIGTERM" in said
        assert "SIGTERM was passed on" in said
        assert time.monotonic() - begun < 20


def test_the_documentation_says_of_every_failure_mode_whether_it_is_seen() -> None:
    text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    section = text.partition("## A program of your own")[2]
    assert section
    assert [mode.slug for mode in all_modes() if f"`{mode.slug}`" not in section] == []
