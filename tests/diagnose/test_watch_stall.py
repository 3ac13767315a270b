"""A program that stands still is asked for its stacks, and ended only where that is wanted."""

import time
from pathlib import Path

import pytest
from watched_programs import run_cli, slugs, watched, written

from dflash.diagnose.process_group import can_be_seen
from dflash.diagnose.verdicts import diagnose_watched

pytestmark = pytest.mark.skipif(not can_be_seen(), reason="a stall is read from /proc")
STILL_S = 0.7
HANGING = """
import sys, threading, time
held = threading.Lock()
held.acquire()
def create_fw_bw_graph():
    held.acquire(timeout=float(sys.argv[1]))
def compile_fx_backward():
    held.acquire(timeout=float(sys.argv[1]))
threads = [threading.Thread(target=create_fw_bw_graph)]
if len(sys.argv) < 3:
    threads.append(threading.Thread(target=compile_fx_backward))
[thread.start() for thread in threads], [thread.join() for thread in threads]
print("went on")
"""


def test_threads_that_wait_for_each_other_are_seen_and_left_alone(tmp_path: Path) -> None:
    seen = watched([*written(tmp_path, HANGING), "2.2"], stall_s=STILL_S)
    (stall,) = seen.stalls  # told once, although it goes on
    assert STILL_S <= stall.at_s < 2.2
    assert stall.stacks.count("(most recent call first)") == 3
    found = diagnose_watched(seen)
    assert (slugs(found), found.exit_code) == (["compile-deadlock"], 0)
    assert not found.ended_for_stall
    assert found.notes[0].startswith("it stood still after")


def test_a_program_is_ended_for_its_stall_where_that_was_asked_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [*written(tmp_path, HANGING), "60", "one side"]
    seen = run_cli("--stall", str(STILL_S), "--kill-on-stall", "--", *command)
    assert (seen.returncode, seen.stdout) == (5, b"")
    assert time.monotonic() - begun < 30
    said = seen.stderr.decode()
    assert f"watch: no output and no work for {STILL_S:g} s; these are the stacks" in said
    assert "in create_fw_bw_graph" in said
    assert "ended by SIGABRT" in said
    # one side alone may be a compilation
    assert "?? no failure mode was seen, but it stood still and was ended" in said


@pytest.mark.parametrize(
    "work",
    [
        "print('.', end='', flush=True); time.sleep(0.3)",
        "open(os.devnull, 'w').write('x'); time.sleep(0.3)",
        "sum(range(100_000))",
    ],
)
def test_a_program_that_works_or_writes_has_not_stalled(work: str, tmp_path: Path) -> None:
    code = f"import os, time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: {work}"
    assert watched(written(tmp_path, code), stall_s=STILL_S).stalls == []


@pytest.mark.parametrize(
    "first",
    [
        "signal.signal(signal.SIGUSR1, lambda *_: print('mine', file=sys.stderr)); import torch",
        "os.closerange(3, 1000)",
        "os.execvp('sleep', ['sleep', '2.2'])",
    ],
)
def test_a_program_that_a_signal_would_disturb_is_not_signalled(first: str, tmp_path: Path) -> None:
    code = f"import os, signal, sys, time\n{first}\ntime.sleep(2.2)"
    seen = watched(written(tmp_path, code, small_torch=True), stall_s=STILL_S)
    assert [stall.stacks for stall in seen.stalls] == [""]
    assert (seen.code, seen.stderr) == (0, "")


def test_a_program_without_python_can_stall() -> None:
    seen = watched(["sleep", "1.2"], stall_s=STILL_S)
    assert [stall.stacks for stall in seen.stalls] == [""]
    assert seen.code == 0
