"""A capture leaves a graph, or an error that says what and where, and never a mess behind."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash.errors import DflashError
from dflash.execution import CaptureError, SealedError, capture, capture_watch, sealed, unsealed
from dflash.execution.captures import CaptureWatch

CPU = torch.device("cpu")
MENDED = [("endAllocateToPool", 0, "pool"), ("releasePool", 0, "pool"), ("mend", CPU)]
"""What torch itself does not get to where an end fails."""


class FakeGraph:
    """What a capture sees of ``torch.cuda.CUDAGraph``; all of them write to one ``log``."""

    log: list[Any] = []  # noqa: RUF012 - emptied by the fixture
    end_fails = False

    def capture_begin(self, **options: Any) -> None:  # noqa: ANN401
        capture_watch_of_test.begin()
        self.log.append(("begin", options, gc.isenabled()))

    def capture_end(self) -> None:
        self.log.append("end")
        if self.end_fails:
            msg = "operation failed due to a previous error during capture"
            raise RuntimeError(msg)

    def reset(self) -> None:
        self.log.append("reset")


capture_watch_of_test = CaptureWatch()
CAPTURE_S = 0.02


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No CUDA: a fake graph, and contexts of devices and streams that do nothing."""

    @contextmanager
    def context(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(FakeGraph, "log", [])
    monkeypatch.setattr(FakeGraph, "end_fails", False)
    monkeypatch.setattr(capture_watch_of_test, "_guards", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool of its own")
    monkeypatch.setattr(
        torch.cuda, "current_blas_handle", lambda: FakeGraph.log.append("cuBLAS handle")
    )
    for name in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(
            f"torch._C._cuda_{name}",
            lambda *what, name=name: FakeGraph.log.append((name, *what)),
            raising=False,
        )
    monkeypatch.setattr(
        "dflash.execution.graphs._capture_one_kernel",
        lambda device: FakeGraph.log.append(("mend", device)),
    )
    monkeypatch.setattr(torch.cuda, "device", context)
    monkeypatch.setattr(torch.cuda, "stream", context)
    for module in ("graphs", "seal"):
        monkeypatch.setattr(
            f"dflash.execution.{module}.capture_watch", lambda: capture_watch_of_test
        )
    yield
    assert gc.isenabled()


def captured(body: Callable[[], object]) -> Any:  # noqa: ANN401
    stream: Any = None
    return capture(body, device=CPU, stream=stream, pool="pool", what='part "normal"')


def test_a_capture_runs_the_body_once_without_garbage_collection() -> None:
    seen: list[bool] = []
    graph = captured(lambda: seen.append(gc.isenabled()))
    assert isinstance(graph, FakeGraph)
    assert seen == [False]
    options = {"pool": "pool", "capture_error_mode": "thread_local"}
    assert FakeGraph.log == ["cuBLAS handle", ("begin", options, False), "end"]


def test_a_graph_is_made_where_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """``CUDAGraph()`` takes the current stream, and so opens the current device."""
    current = ["cuda:0"]
    made_on: list[str] = []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    class Made(FakeGraph):
        def __init__(self) -> None:
            made_on.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Made)
    stream: Any = SimpleNamespace(device="cuda:1")
    capture(lambda: None, device=torch.device("cuda:1"), stream=stream, pool="pool")
    assert made_on == ["cuda:1"]
    assert current == ["cuda:0"]


def test_what_a_failed_body_had_made_is_gone_though_somebody_keeps_the_error() -> None:
    class Half:
        """Half a backward pass."""

    made: list[weakref.ref[Half]] = []

    def body() -> None:
        half = Half()
        made.append(weakref.ref(half))
        read_on_the_host()

    with pytest.raises(CaptureError) as caught:
        captured(body)
    assert caught.value.__cause__ is not None
    assert made[0]() is None


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        captured(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def read_on_the_host() -> None:
    msg = "operation not permitted when stream is capturing\nand more lines"
    raise RuntimeError(msg)


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_body_that_fails_is_named_with_its_line_and_thread(*, end_fails: bool) -> None:
    FakeGraph.end_fails = end_fails
    with pytest.raises(CaptureError) as caught:
        captured(read_on_the_host)
    what = caught.value.what
    assert what.startswith('part "normal" could not be captured as a CUDA graph on cpu in thread')
    assert threading.current_thread().name in what
    assert "`raise RuntimeError(msg)` (test_graphs.py:" in what
    assert what.endswith("RuntimeError: operation not permitted when stream is capturing")
    assert "execution.mode" in caught.value.hint
    assert caught.value.exit_code == 2
    assert FakeGraph.log[2:] == ["end", "reset", *(MENDED if end_fails else [])]


def test_an_end_that_fails_is_an_error_of_the_capture() -> None:
    FakeGraph.end_fails = True
    with pytest.raises(CaptureError, match="due to a previous error during capture"):
        captured(lambda: None)
    assert FakeGraph.log[2:] == ["end", "reset", *MENDED]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("too much"), KeyboardInterrupt(), DflashError("as it is")]
)
def test_some_errors_keep_their_kind(error: BaseException) -> None:
    def body() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        captured(body)
    assert caught.value is error
    assert FakeGraph.log[2:] == ["end", "reset"]


def test_a_capture_inside_an_except_block_blames_its_own_error() -> None:
    try:
        msg = "something else"
        raise ValueError(msg)  # noqa: TRY301
    except ValueError:
        with pytest.raises(CaptureError, match="operation not permitted"):
            captured(read_on_the_host)


def test_captures_are_counted_by_thread() -> None:
    before = capture_watch_of_test.begun.copy()
    captured(lambda: None)
    thread = threading.Thread(target=captured, args=(lambda: None,), name="drafter-7")
    thread.start()
    thread.join()
    new = capture_watch_of_test.begun - before
    assert dict(new) == {threading.current_thread().name: 1, "drafter-7": 1}


def test_a_sealed_process_captures_only_unsealed_and_only_in_that_thread() -> None:
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            captured(lambda: None)
        except SealedError as error:
            refused.append(error)

    with sealed():
        with pytest.raises(SealedError, match="a CUDA graph capture began in thread") as caught:
            captured(lambda: None)
        with unsealed():
            captured(lambda: None)
            thread = threading.Thread(target=elsewhere, name="drafter-1")
            thread.start()
            thread.join()
        with pytest.raises(SealedError):
            captured(lambda: None)
    assert caught.value.exit_code == 14
    assert "in thread drafter-1" in str(refused[0])
    captured(lambda: None)


def test_unsealed_is_nothing_where_nothing_is_sealed() -> None:
    ran: list[str] = []
    with unsealed():
        captured(lambda: ran.append("body"))
    assert ran == ["body"]


def test_mending_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_device: torch.device) -> None:
        msg = "no luck"
        raise RuntimeError(msg)

    FakeGraph.end_fails = True
    monkeypatch.setattr("dflash.execution.graphs._capture_one_kernel", fails)
    with pytest.raises(CaptureError, match="operation not permitted"):
        captured(read_on_the_host)


def test_a_refused_capture_has_nothing_to_mend() -> None:
    with sealed(), pytest.raises(SealedError):
        captured(lambda: None)
    assert FakeGraph.log == ["cuBLAS handle", "reset"]


def test_a_capture_without_a_pool_gets_one_of_its_own() -> None:
    stream: Any = None
    capture(lambda: None, device=CPU, stream=stream)
    assert FakeGraph.log[1][1]["pool"] == "a pool of its own"


def test_the_watch_sees_what_torch_itself_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    begun: list[str] = []

    class Graph:
        def capture_begin(self, pool: object = None) -> str:
            begun.append(str(pool))
            return "began"

        def capture_end(self) -> str:
            time.sleep(CAPTURE_S)
            return "ended"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    watch = capture_watch.__wrapped__()
    assert Graph().capture_begin(pool="p") == "began"  # type: ignore[comparison-overlap]
    assert begun == ["p"]
    assert watch.total == 1
    assert watch.seconds == 0.0
    assert Graph().capture_end() == "ended"  # type: ignore[comparison-overlap]
    assert watch.seconds >= CAPTURE_S
    after = watch.seconds
    Graph().capture_end()  # of a capture that was not counted
    assert watch.seconds == after
