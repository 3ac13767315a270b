"""Counts every capture of a CUDA graph that any code of this process begins.

Torch's own graphs (``torch.cuda.graph``, cudagraph trees) and ours all go through
``torch.cuda.CUDAGraph.capture_begin``, so that is where they are counted, by thread.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class CaptureWatch:
    """Counts the captures that begin, by the name of their thread; guards may refuse one."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self._guards: list[Callable[[], None]] = []

    @property
    def total(self) -> int:
        """Captures begun so far, by all threads."""
        return sum(self.begun.values())

    def guard(self, refuse: Callable[[], None]) -> None:
        """Call *refuse* in the thread of every capture that is about to begin; it may raise."""
        self._guards.append(refuse)

    def unguard(self, refuse: Callable[[], None]) -> None:
        """Undo one ``guard``."""
        self._guards.remove(refuse)

    def begin(self) -> None:
        """Called before a capture begins, in its thread."""
        for refuse in self._guards:
            refuse()
        self.begun[threading.current_thread().name] += 1


@functools.cache
def capture_watch() -> CaptureWatch:
    """Return the one watch of this process; the first call puts it in place, for good."""
    watch = CaptureWatch()
    graph_type: Any = torch.cuda.CUDAGraph
    original = graph_type.capture_begin

    @functools.wraps(original)
    def capture_begin(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's own
        watch.begin()
        return original(*arguments, **options)

    graph_type.capture_begin = capture_begin
    return watch


def begin_uncounted(graph: torch.cuda.CUDAGraph, **options: Any) -> None:  # noqa: ANN401
    """Begin a capture that no guard may refuse: one that mends what a broken one has left."""
    begin = type(graph).capture_begin
    getattr(begin, "__wrapped__", begin)(graph, **options)
