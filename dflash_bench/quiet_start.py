"""Starting children that neither end by Ctrl-C nor leave warnings behind."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C and ``timeout`` signal whole groups; what is started inside is not ended by them.

    It must let SIGTERM in again by itself, or nothing that it starts can be ended in that way.
    """
    _start_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start multiprocessing's own process now: later, its start would lift the block.

    It tidies up what compilers of children leave, who never end in an orderly way, and need not
    tell of it.
    """
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(option)
