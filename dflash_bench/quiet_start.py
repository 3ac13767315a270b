"""Starting children that neither see Ctrl-C nor leave warnings behind."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C goes to every process of the terminal; what is started inside never sees it."""
    _start_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
