"""CUDA's rules for captures without CUDA: who may do what while a graph is being captured.

Tensors that a program puts on "cuda" are on the CPU; graphs record nothing. What is kept are the
rules of the capture modes (CUDA's documentation of cudaStreamCaptureMode) and the one flag of the
default generator up to torch 2.11.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from dflash.execution.captures import CaptureWatch
from dflash.execution.compiling import first_compile

REFUSED = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
DRAWN = "Offset increment outside graph capture encountered unexpectedly."
MAKERS = ("empty", "ones", "zeros", "randn", "tensor", "full", "arange")
OPEN_S = 0.005  # a capture is open for long enough that a busy neighbour comes across it


class FakeGraph:
    """``torch.cuda.CUDAGraph`` as far as its mode goes; ``captures`` are those that are open."""

    captures: "list[FakeGraph]" = []  # noqa: RUF012 - all of them share it

    def capture_begin(
        self, *_pool: object, capture_error_mode: str = "global", **_: object
    ) -> None:
        self.thread, self.mode, self.broken = threading.get_ident(), capture_error_mode, False
        self.captures.append(self)
        time.sleep(OPEN_S)

    def capture_end(self) -> None:
        self.captures.remove(self)
        if self.broken:
            raise RuntimeError(BROKEN)

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


def unsafe(*_: object, **__: object) -> None:
    """A call that may not be made while a capture is open, unless the mode says otherwise."""
    here = threading.get_ident()
    for graph in list(FakeGraph.captures):
        if graph.mode == "global" or (graph.mode == "thread_local" and graph.thread == here):
            graph.broken = True
            raise RuntimeError(REFUSED)


class FakeStream:
    """Of the one GPU there is."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: object) -> None: ...


class FakeEvent:
    record = unsafe
    query = unsafe


@contextmanager
def _context(_: object) -> Iterator[None]:
    yield


def _on_cpu(make: Callable[..., Any], *, mallocs_from: int) -> Callable[..., Any]:
    def made(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's own
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
            if arguments and arguments[0] == mallocs_from:
                unsafe()
        return make(*arguments, **options)

    return made


def _drawn(*arguments: Any, **_: object) -> torch.Tensor:  # noqa: ANN401
    if FakeGraph.captures and FakeGraph.captures[0].thread != threading.get_ident():
        raise RuntimeError(DRAWN)
    return torch.zeros(*arguments)


def install(monkeypatch: pytest.MonkeyPatch, *, mallocs_from: int) -> None:
    """Replace CUDA; an allocation of *mallocs_from* elements is one that calls cudaMalloc."""
    monkeypatch.setattr(FakeGraph, "captures", [])
    first_compile()  # on its first use the compiler learns which functions are torch's
    for name in MAKERS:
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, _on_cpu(make, mallocs_from=mallocs_from))
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *a, **o: x if a[:1] == ("cuda",) else to(x, *a, **o)
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch, "rand", _drawn)
    replaced = {
        "CUDAGraph": FakeGraph, "Event": FakeEvent, "Stream": FakeStream,
        "empty_cache": unsafe, "synchronize": lambda *_: None, "manual_seed": lambda _: None,
        "graph_pool_handle": lambda: "pool", "device": _context, "stream": _context,
        "current_blas_handle": lambda: 0,
    }  # fmt: skip
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr("torch._C._host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: object())
    if find_spec("torch.cuda._graph_annotations"):  # torch 2.14 asks for the stream
        monkeypatch.setattr(
            "torch.cuda._graph_annotations.maybe_stamp_capture_root",
            lambda _stream: None,
            raising=False,
        )
    monkeypatch.setattr("dflash.execution.graphs.capture_watch", CaptureWatch)
