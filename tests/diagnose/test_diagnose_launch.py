"""A child's end is told for what it was, and no child outlives its parent."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash.diagnose.findings import Launch
from dflash.diagnose.launch import Order, run_jobs, run_orders
from dflash.diagnose.room import Room, room_of

ROOT = Path(__file__).parents[2]
PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from dflash.diagnose.launch import Order, run_orders
orders = [Order(address="fake_modes:LINGER", variant="faulty", seed=s) for s in range(2)]
list(run_orders(orders, width=2))
"""


def launched(name: str, *, time_limit_s: float = 60.0) -> Launch:
    order = Order(address=f"fake_modes:{name}", variant="faulty", seed=7, time_limit_s=time_limit_s)
    (launch,) = run_orders([order])
    assert launch.seed == 7
    return launch


@pytest.mark.parametrize(
    ("name", "end", "message"),
    [
        ("SEGV", "signal", "SIGSEGV"),
        ("CUDA", "cuda error", "RuntimeError: CUDA error: operation not permitted"),
        ("MEMORY", "out of memory", "MemoryError"),
        ("THREAD", "exception", "AssertionError"),
        ("LEAVE", "exception", "ended with code 3 and without a result"),
        ("KILLED", "killed", "SIGKILL"),
    ],
)
def test_an_end_is_told_for_what_it_was(name: str, end: str, message: str) -> None:
    launch = launched(name)
    assert (launch.end, launch.message[: len(message)]) == (end, message)
    assert [mark.kind for mark in launch.marks][:1] == ["cuda"]  # it survived the end


def test_a_number_comes_back_with_its_time() -> None:
    launch = launched("NUMBER")
    assert (launch.end, launch.value) == ("number", 3.0)
    assert 0 < launch.wall_s < 60
    assert launch.marks[0].thread == "MainThread"
    assert 0 < launch.marks[0].at_s < launch.wall_s


def test_a_crash_leaves_its_stacks() -> None:
    launch = launched("SEGV")
    assert "Segmentation fault" in launch.stacks
    assert "in crash" in launch.stacks


def test_a_dead_thread_is_named_with_its_traceback() -> None:
    launch = launched("THREAD")
    assert launch.thread == "worker-1"
    assert "raise AssertionError" in launch.traceback


def test_a_hang_ends_at_its_limit_with_the_stacks_of_all_threads() -> None:
    begun = time.monotonic()
    launch = launched("HANG", time_limit_s=1.5)
    assert time.monotonic() - begun < 30
    assert launch.end == "hang"
    assert launch.message == "no end within 1.5 s"
    assert launch.stacks.count("(most recent call first)") == 2
    assert "in hang" in launch.stacks


def test_an_end_before_the_time_of_a_hang_is_no_hang() -> None:
    order = Order(address="fake_modes:HANG", variant="faulty", time_limit_s=0.5, hang_s=1.5)
    (launch,) = run_orders([order])
    assert launch.end == "killed"
    assert launch.message == "no end within 0.5 s, of the 1.5 s after which it counts as hung"


def test_a_mode_that_cannot_be_imported_is_no_verdict() -> None:
    (launch,) = run_orders([Order(address="no_such_module:X", variant="faulty")])
    assert launch.end == "not started"
    assert "No module named 'no_such_module'" in launch.message


def test_an_interpreter_that_cannot_be_started_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    launch = launched("QUIET")
    assert launch.end == "not started"
    assert "/nowhere/python cannot be started: No such file" in launch.message


def test_launches_go_side_by_side_and_all_come_back() -> None:
    orders = [Order(address="fake_modes:QUIET", variant="sound", seed=s) for s in range(5)]
    assert sorted(launch.seed for launch in run_orders(orders, width=3)) == [0, 1, 2, 3, 4]


def test_launches_on_gpus_have_one_each_to_themselves() -> None:
    orders = [Order(address="fake_modes:GPU", variant="faulty", num_gpus=1) for _ in range(4)]
    spans: dict[float, list[tuple[float, float]]] = {}
    for _, launch in run_jobs([iter([orders])], Room(width=1, gpus=("3", "5"))):
        now = time.monotonic()
        assert launch.value is not None, launch.message
        spans.setdefault(launch.value, []).append((now - launch.wall_s, now))
    assert sorted(spans) == [3.0, 5.0]
    for mine in spans.values():
        assert all(one[1] <= other[0] + 0.1 for one, other in itertools.pairwise(sorted(mine)))


def test_launches_of_different_jobs_go_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEETING", str(tmp_path))
    jobs = [
        iter([[Order(address=f"fake_modes:{name}", variant="faulty")]])
        for name in ("MEET", "ALSO_MEET")
    ]
    assert sorted((n, one.value) for n, one in run_jobs(jobs, Room(width=2))) == [(0, 2), (1, 2)]


def test_a_job_is_asked_for_its_next_launches_after_its_last_ones_were_seen() -> None:
    seen: list[int] = []

    def rounds() -> Iterator[list[Order]]:
        yield [Order(address="fake_modes:QUIET", variant="sound", seed=s) for s in (0, 1)]
        assert sorted(seen) == [0, 1]
        yield []
        yield [Order(address="fake_modes:QUIET", variant="sound", seed=2)]

    for _, launch in run_jobs([rounds()], Room(width=4)):
        seen.append(launch.seed)
    assert sorted(seen) == [0, 1, 2]


def test_room_is_given_to_gpus_first_and_to_the_rest_up_to_its_width() -> None:
    room = Room(width=2, gpus=("a", "b"))
    assert room.take(0) == ()
    assert room.take(1) == ("a",)
    assert room.take(0) is None  # two run already
    assert room.take(2) is None
    assert room.take(1) == ("b",)  # which waits for GPUs alone
    room.give_back(("a",))
    assert room.take(2) is None
    room.give_back(("b",))
    assert room.take(2) == ("a", "b")


def test_the_gpus_of_a_room_are_those_that_this_process_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-7f")
    assert room_of(2, 16) == Room(8, ("4", "GPU-7f"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert room_of(2, 3) == Room(2, ("0", "1"))
    assert room_of(0, 1) == Room(1, ())
    assert Room(1, ("0", "1")).visible(("1",)) == "1"
    assert Room(1, ("0",)).visible(("0",)) == ""  # nothing to hide


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def started_parent(folder: Path) -> tuple["subprocess.Popen[bytes]", list[int], list[int]]:
    """A parent with two children at work; the ids of those, and of what they started."""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PIDS": str(folder), "PYTHONPATH": here}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, here], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 60
    while sum(bool(path.read_text()) for path in folder.iterdir()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    files = list(folder.iterdir())
    return parent, [int(f.name) for f in files], [int(f.read_text()) for f in files]


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_ctrl_c_leaves_no_child_behind(tmp_path: Path) -> None:
    parent, children, grandchildren = started_parent(tmp_path)
    parent.send_signal(signal.SIGINT)
    parent.wait(timeout=30)
    assert gone(children)
    assert gone(grandchildren)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_the_parents_own_death_leaves_no_child_behind(tmp_path: Path) -> None:
    parent, children, grandchildren = started_parent(tmp_path)
    parent.kill()
    parent.wait(timeout=30)
    assert gone(children)
    for pid in grandchildren:  # what a child starts must watch it by itself, as torch's workers do
        os.kill(pid, signal.SIGKILL)
