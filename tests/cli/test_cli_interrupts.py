"""SIGTERM ends a command as Ctrl-C does, and the double signal of ``timeout`` is one."""

import os
import signal
from collections.abc import Iterator

import pytest

from dflash.cli import interrupts
from dflash.cli.interrupts import sigterm_is_ctrl_c


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in interrupts.SIGNALS} == kept


@pytest.mark.parametrize("signum", interrupts.SIGNALS)
def test_either_signal_is_an_interrupt(signum: int) -> None:
    with pytest.raises(KeyboardInterrupt), sigterm_is_ctrl_c():
        os.kill(os.getpid(), signum)


def interrupts_of_two(signum: int) -> int:
    count = 0
    with sigterm_is_ctrl_c():
        for _ in range(2):
            try:
                os.kill(os.getpid(), signum)
            except KeyboardInterrupt:
                count += 1
    return count


def test_two_signals_at_once_are_one_and_later_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert interrupts_of_two(signal.SIGTERM) == 1
    monkeypatch.setattr(interrupts, "TOGETHER_S", 0.0)
    assert interrupts_of_two(signal.SIGINT) == 2


def test_a_signal_that_is_ignored_stays_so() -> None:
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interrupts_of_two(signal.SIGINT) == 0
    finally:
        signal.signal(signal.SIGINT, kept)
