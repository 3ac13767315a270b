"""What the user asks for from outside while a run goes on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedNowError(BaseException):
    """A second signal arrived: end without another checkpoint."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Stop at the next step, or a checkpoint now."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self.checkpoint = threading.Event()

    def on_stop(self, signum: int, _frame: FrameType | None) -> None:
        if self.stop is not None:
            raise StoppedNowError(signum)
        self.stop = signum

    def on_checkpoint(self, _signum: int, _frame: FrameType | None) -> None:
        self.checkpoint.set()


@contextmanager
def listening(signals: Signals) -> Iterator[None]:
    """Route SIGTERM and SIGINT to a stop and SIGUSR2 to a checkpoint while inside."""
    handlers = {
        signal.SIGTERM: signals.on_stop,
        signal.SIGINT: signals.on_stop,
        signal.SIGUSR2: signals.on_checkpoint,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
