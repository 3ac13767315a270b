"""Subjects take turns in processes of their own, and one that dies takes no other with it."""

import os
import signal
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from bench_subjects import (
    Answering,
    Crashing,
    Empty,
    Hanging,
    Leaving,
    Long,
    Made,
    OutOfMemoryError,
    Printing,
    Raising,
    Slow,
    Sound,
    Unbuilt,
)

from dflash.errors import DeviceMemoryError, WorkerDiedError
from dflash_bench.child import Child
from dflash_bench.subjects import failure_of
from dflash_bench.turns import keep_what_is_known, make_ready, take_turns


def run(subjects: dict[str, type[Sound]], log: Path, *, num_turns: int = 2) -> list[Child]:
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(name, partial(kind, name, log), limit_s=20.0))
            for name, kind in subjects.items()
        ]
        make_ready(children, say=lambda _: None)
        take_turns(children, enough=lambda number: number == num_turns, say=lambda _: None)
        for child in children:
            child.finish()
    return children


def test_turns_go_there_and_back(tmp_path: Path) -> None:
    children = run({"A": Sound, "B": Sound}, tmp_path / "log", num_turns=4)
    assert (tmp_path / "log").read_text() == "ABBAABBA"
    assert [child.turns for child in children] == [[[1.0, 2.0]] * 4] * 2
    assert all(child.facts["finished"] and child.failure is None for child in children)
    assert len({os.getpid(), *(child.facts["process"] for child in children)}) == 3


def test_a_bench_that_is_killed_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Child("made", partial(Made, "made", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        while not (tmp_path / "log").exists():  # nobody has waited for its answer yet
            time.sleep(0.01)
        assert not list(tmp_path.glob("*.stacks"))


def test_a_turn_without_a_step_is_a_failure(tmp_path: Path) -> None:
    (child,) = run({"empty": Empty}, tmp_path / "log")
    assert child.failure is not None
    assert (child.failure.message, child.failure.during) == ("a turn without a step", "turn")
    assert child.turns == []


def test_a_subject_that_dies_in_any_way_is_a_failure_and_the_rest_goes_on(tmp_path: Path) -> None:
    kinds = {"raises": Raising, "crashes": Crashing, "leaves": Leaving, "sound": Sound}
    kinds |= {"unbuilt": Unbuilt}
    found = {child.name: child for child in run(kinds, tmp_path / "log")}
    raised, crashed, left = (found[name].failure for name in ("raises", "crashes", "leaves"))
    assert raised is not None
    assert (raised.type, raised.message) == ("ValueError", "a tensor of the wrong shape")
    assert raised.during == "turn"
    assert "and a second line" in raised.trace
    assert crashed is not None
    assert (crashed.type, crashed.during) == ("ProcessDied", "prepare")
    assert "SIGABRT" in crashed.message
    assert left is not None
    assert (left.message, left.during) == ("exit code 7", "finish")
    assert len(found["leaves"].turns) == 2
    unbuilt = found["unbuilt"].failure
    assert unbuilt is not None
    assert (unbuilt.message, unbuilt.during) == ("exit code 3", "build")
    assert found["sound"].failure is None
    assert found["sound"].facts["finished"]


def test_a_subject_that_hangs_is_ended(tmp_path: Path) -> None:
    with Child("hangs", partial(Hanging, "hangs", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        child.prepare()
        child.limit_s = 0.5
        child.turn()
        assert child.failure is not None
        assert (child.failure.type, child.failure.during) == ("Hang", "turn")
        assert "bench_subjects.py" in child.failure.trace  # where every thread was
        child.finish()
    assert not child.alive


def chained(error: Exception, *, cause: Exception | None, context: Exception | None) -> Exception:
    """*error* as it is caught where it came of another, which may be itself."""
    error.__cause__, error.__context__ = cause, context
    return error


NO_CONTEXT = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported")
SHAPE = ValueError("a tensor of the wrong shape")
ITSELF = KeyError("mask")


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (OutOfMemoryError("CUDA out of memory"), True),
        (OutOfMemoryError(), True),
        (DeviceMemoryError("worker target-0 ran out of device memory: no more"), True),
        (MemoryError(), True),
        (NO_CONTEXT, True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (chained(WorkerDiedError("it died"), cause=OutOfMemoryError(), context=None), True),
        (chained(KeyError("mask"), cause=SHAPE, context=NO_CONTEXT), True),
        (chained(KeyError("mask"), cause=SHAPE, context=SHAPE), False),
        (chained(ITSELF, cause=ITSELF, context=ITSELF), False),
        (SHAPE, False),
    ],
)
def test_a_lack_of_memory_is_known_by_any_error_that_led_to_it(
    *, error: Exception, lacks: bool
) -> None:
    assert failure_of(error, "turn", known={}).out_of_memory is lacks


@pytest.mark.parametrize(("order", "turns"), [("turn", [[3.0]]), ("extra_turn", [])])
def test_a_turn_that_is_interrupted_counts_unless_it_is_extra_and_what_is_known_is_taken(
    tmp_path: Path, order: str, turns: list[list[float]]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    with Child("long", partial(Long, "long", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        child.prepare()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            getattr(child, order)()
        signal.signal(signal.SIGALRM, before)
        assert child.turns == []
        keep_what_is_known([child])
    assert child.turns == turns
    assert child.facts["told"] == "so far"
    assert child.failure is None


def test_an_extra_turn_is_none_of_its_turns(tmp_path: Path) -> None:
    with Child("sound", partial(Sound, "sound", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        child.prepare()
        child.turn()
        assert child.extra_turn() == [1.0, 2.0]
        assert child.turns == [[1.0, 2.0]]
        child.turn()
        assert child.turns == [[1.0, 2.0]] * 2
    with Child("raises", partial(Raising, "raises", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        child.prepare()
        assert child.extra_turn() == []
        assert child.failure is not None


def test_a_child_whose_answer_nobody_read_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with Child("sound", partial(Answering, "sound", log), limit_s=20.0) as child:
        child.start()
        child.build()
        ends_at = time.monotonic() + 20.0
        while not log.exists() and time.monotonic() < ends_at:
            time.sleep(0.05)
        time.sleep(0.5)  # for the answer itself, which comes after what it is about
        child.close()  # in peace: it is not killed, so it ends by what it finds in its pipe
    assert log.read_text() == "built"
    assert capfd.readouterr().err == ""


def test_a_child_outlives_the_signals_of_its_group(tmp_path: Path) -> None:
    with Child("sound", partial(Sound, "sound", tmp_path / "log"), limit_s=20.0) as child:
        child.start()
        child.prepare()
        assert child.pid is not None
        for signum in (signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid, signum)
        child.turn()
        assert child.turns == [[1.0, 2.0]]


def test_what_a_subject_prints_stays_out_of_the_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run({"prints": Printing}, tmp_path / "log", num_turns=1)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "this is not a result" in shown.err


def test_the_time_to_the_first_step_leaves_out_waiting_for_others(tmp_path: Path) -> None:
    slow, quick = run({"slow": Slow, "quick": Sound}, tmp_path / "log")
    assert slow.prepared_s > Slow.SECONDS
    assert 0 < quick.prepared_s < Slow.SECONDS  # it was built while the other was preparing


def test_who_follows_is_made_before_others_take_turns_and_built_when_it_may(
    tmp_path: Path,
) -> None:
    log, began = tmp_path / "log", time.monotonic()
    with (
        Child("now", partial(Sound, "now", tmp_path / "turns"), limit_s=20.0) as now,
        Child("later", partial(Made, "later", log), limit_s=20.0) as later,
    ):
        make_ready([now], say=lambda _: None, following=later)
        assert log.read_text() == "made"
        time.sleep(1.5)
        assert log.read_text() == "made"
        make_ready([later], say=lambda _: None)
        assert log.read_text() == "built"
    assert Made.SECONDS < later.prepared_s < time.monotonic() - began - 1.5
