"""Idle time of a stream is what its events say, counted once and only when it is over."""

import pytest
import torch

from dflash.pipeline.idle import StreamIdle


class FakeEvent:
    """An event of a stream whose clock the test turns."""

    now_ms = 0.0
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.happened = True
        self.time_ms = 0.0
        FakeEvent.made += 1

    def record(self) -> None:
        self.time_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return FakeEvent.now_ms >= self.time_ms + 10

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.time_ms - self.time_ms


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.now_ms, FakeEvent.made = 0.0, 0


def wait(idle: StreamIdle, *, milliseconds: float) -> None:
    with idle.waiting():
        FakeEvent.now_ms += milliseconds


def test_waits_add_up_once_they_are_over() -> None:
    idle = StreamIdle()
    wait(idle, milliseconds=30)
    wait(idle, milliseconds=5)
    assert idle.seconds == 0.0, "the device has not come that far"
    FakeEvent.now_ms += 7
    assert idle.seconds == pytest.approx(0.030)
    FakeEvent.now_ms += 50
    assert idle.seconds == pytest.approx(0.035)
    assert idle.seconds == pytest.approx(0.035), "reading counts nothing twice"


def test_events_are_used_again() -> None:
    idle = StreamIdle()
    for _ in range(20):
        wait(idle, milliseconds=20)
        assert idle.seconds >= 0
    assert FakeEvent.made <= 6
