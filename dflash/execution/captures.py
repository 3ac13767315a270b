"""Counts every capture of a CUDA graph that any code of this process begins.

Torch's own graphs (``torch.cuda.graph``, cudagraph trees) and ours all go through
``torch.cuda.CUDAGraph.capture_begin``, so that is where they are counted, by thread.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class CaptureWatch:
    """Counts the captures that begin, by the name of their thread; guards may refuse one.

    ``seconds`` is what all captures that came to their end have taken, instantiation included.
    """

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.seconds = 0.0
        self._here = threading.local()
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
        self._here.since = time.perf_counter()

    def end(self) -> None:
        """Called after a capture has ended, in its thread."""
        since = self._here.__dict__.pop("since", None)
        if since is not None:
            self.seconds += time.perf_counter() - since


@functools.cache
def capture_watch() -> CaptureWatch:
    """Return the one watch of this process; the first call puts it in place, for good."""
    watch = CaptureWatch()
    graph_type: Any = torch.cuda.CUDAGraph
    begin, end = graph_type.capture_begin, graph_type.capture_end

    @functools.wraps(begin)
    def capture_begin(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's own
        watch.begin()
        return begin(*arguments, **options)

    @functools.wraps(end)
    def capture_end(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's own
        answer = end(*arguments, **options)
        watch.end()
        return answer

    graph_type.capture_begin, graph_type.capture_end = capture_begin, capture_end
    return watch


def begin_uncounted(graph: torch.cuda.CUDAGraph, **options: Any) -> None:  # noqa: ANN401
    """Begin a capture that no guard may refuse: one that mends what a broken one has left."""
    begin = type(graph).capture_begin
    getattr(begin, "__wrapped__", begin)(graph, **options)
