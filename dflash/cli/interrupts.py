"""Ending early and keeping what was found."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt inside for SIGTERM too, which ``timeout`` and job schedulers send."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
