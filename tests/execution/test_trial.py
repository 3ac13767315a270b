"""``auto`` takes the first mode that works and is worth it, and never without saying so."""

from collections.abc import Iterator

import pytest
import torch
from programs import Counting

from dflash.execution import CaptureError, Mode, ModeChoice, NumericsError, Runner, make_ready
from dflash.execution.report import WarmUp

AUTO = ModeChoice("graphed", "there is a GPU", ("compiled", "eager"))


class FakeExecution:
    """A mode that works, fails or is slow as ``MODES`` says; ``log`` is what all were asked."""

    log: list[str] = []  # noqa: RUF012 - emptied by the fixture
    fails: dict[str, Exception] = {}  # noqa: RUF012
    times: dict[str, tuple[float, float | None]] = {}  # noqa: RUF012

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def warm_up(self) -> WarmUp:
        self.log.append(f"warm {self.mode}")
        if self.mode in self.fails:
            raise self.fails[self.mode]
        launched_s, replayed_s = self.times.get(self.mode, (1.0, None))
        return WarmUp(launched_s=launched_s, replayed_s=replayed_s)

    def close(self) -> None:
        self.log.append(f"close {self.mode}")


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeExecution]]:
    for name, fresh in (("log", []), ("fails", {}), ("times", {})):
        monkeypatch.setattr(FakeExecution, name, fresh)
    monkeypatch.setattr(
        "dflash.execution.runner._execution_of", lambda _program, mode, **_: FakeExecution(mode)
    )
    return FakeExecution


def ready(choice: ModeChoice, *, count: int = 2) -> tuple[ModeChoice, list[Runner], list[str]]:
    said: list[str] = []
    programs = [Counting() for _ in range(count)]
    found = make_ready(programs, choice, streams=[None] * count, say=said.append)
    return found.choice, found.runners, said


def test_the_first_mode_that_works_is_taken_with_its_figures(modes: type[FakeExecution]) -> None:
    modes.times["graphed"] = (0.020, 0.010)
    choice, runners, said = ready(AUTO)
    assert [runner.mode for runner in runners] == ["graphed"] * 2
    assert choice.why == (
        "there is a GPU; in a trial replaying all rounds took 10.0 ms, launching them 20.0 ms"
    )
    assert said == []


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("part x could not be captured", hint="no"),
        NumericsError("other numbers"),
        torch.OutOfMemoryError("no room"),
    ],
)
def test_a_mode_that_fails_gives_way_and_is_closed(
    modes: type[FakeExecution], error: Exception
) -> None:
    modes.fails["graphed"] = error
    choice, runners, said = ready(AUTO)
    assert [runner.mode for runner in runners] == ["compiled"] * 2
    assert choice.mode == "compiled"
    reason = str(error).splitlines()[0]
    assert choice.why == f"graphed was tried first: {reason}"
    assert said == [f"execution mode compiled: {choice.why}"]
    assert modes.log == ["warm graphed", "close graphed", "warm compiled", "warm compiled"]


def test_a_mode_that_was_asked_for_never_gives_way(modes: type[FakeExecution]) -> None:
    modes.fails["graphed"] = CaptureError("no")
    with pytest.raises(CaptureError):
        ready(ModeChoice("graphed", "asked for"))
    assert modes.log == ["warm graphed", "close graphed"]
    modes.fails.clear()
    modes.times["graphed"] = (0.010, 0.050)
    choice, _, _ = ready(ModeChoice("graphed", "asked for"))
    assert choice == ModeChoice("graphed", "asked for"), "however slow"


def test_the_last_mode_s_error_is_the_run_s(modes: type[FakeExecution]) -> None:
    for mode in ("graphed", "compiled", "eager"):
        modes.fails[mode] = CaptureError(f"not {mode}")
    with pytest.raises(CaptureError, match="not eager"):
        ready(AUTO)


def test_replaying_that_is_slower_than_launching_is_not_taken(modes: type[FakeExecution]) -> None:
    modes.times["graphed"] = (0.010, 0.011)
    choice, runners, _ = ready(AUTO)
    assert runners[0].mode == "compiled"
    assert choice.why == (
        "graphed was tried first: replaying all rounds took 11.0 ms, launching them 10.0 ms"
    )
    modes.times["graphed"] = (0.010, 0.0101)
    assert ready(AUTO)[0].mode == "graphed", "as good as equal leaves the host free"


def test_one_program_that_fails_takes_the_others_along(modes: type[FakeExecution]) -> None:
    """Replicas must run the same kernels."""
    original = FakeExecution.warm_up
    count = 0

    def second_fails(self: FakeExecution) -> WarmUp:
        nonlocal count
        count += 1
        if count == 2:
            msg = "only here"
            raise CaptureError(msg)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeExecution, "warm_up", second_fails)
        _, runners, _ = ready(AUTO)
    assert {runner.mode for runner in runners} == {"compiled"}
    assert modes.log.count("close graphed") == 2
