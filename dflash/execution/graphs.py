"""One CUDA graph of one function. Knows nothing of programs, parts or modes."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dflash.errors import DflashError
from dflash.execution.captures import begin_uncounted, capture_watch
from dflash.execution.faults import capture_error
from dflash.execution.streams import on_stream


def capture(
    body: Callable[[], object],
    *,
    device: torch.device,
    stream: torch.cuda.Stream,
    pool: Any = None,  # noqa: ANN401 - torch gives the handle no public type
    what: str = "a function",
) -> torch.cuda.CUDAGraph:
    """Record what *body* launches, without running it; ``replay`` of the result runs it.

    Other threads may use the GPU meanwhile, except by calls that wait for the whole device. *body*
    must have run before, on the same *stream*, so that nothing compiles or is created on first use;
    this thread's cuBLAS handle, which no capture can make, is made here.
    Whatever it reads and writes is at the same addresses in every replay; what it allocates lives
    in *pool* and is reused by the next capture into it, unless somebody still holds it.

    Args:
        body: launches kernels on the current stream; no host synchronisation.
        device: the one it runs on.
        stream: not the default one.
        pool: ``torch.cuda.graph_pool_handle()``, shared by graphs that never run at once.
        what: names *body* in an error.

    Raises:
        CaptureError: something in *body* cannot be captured; nothing is left behind.
        SealedError: the process is sealed.
        torch.OutOfMemoryError: as it comes.
    """
    capture_watch()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    torch.cuda.synchronize(device)
    with _no_garbage_collection(), on_stream(stream):
        graph = torch.cuda.CUDAGraph()  # made elsewhere it would open that GPU
        torch.cuda.current_blas_handle()
        broken = _recorded(body, graph, pool, device=device)
    if broken is None:
        return graph
    # Half a backward pass lives in the frames: kept, it would tie the parameters to this stream.
    traceback.clear_frames(broken.__traceback__)
    if isinstance(broken, torch.OutOfMemoryError | DflashError) or not isinstance(
        broken, Exception
    ):
        raise broken
    raise capture_error(what, device, broken) from broken


def _recorded(
    body: Callable[[], object],
    graph: torch.cuda.CUDAGraph,
    pool: Any,  # noqa: ANN401 - torch gives the handle no public type
    *,
    device: torch.device,
) -> BaseException | None:
    """Record *body* into *graph*; return what broke it, when nothing of it is left."""
    broken: BaseException | None = None
    begun = ended = False
    try:
        # What other threads do meanwhile is none of this capture's business.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        begun = True
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            broken = error
        graph.capture_end()  # always: only this gives a stream back whose capture is broken
        ended = True
    except BaseException as error:  # noqa: BLE001 - raised again by the caller, after the first
        broken = broken or error
    if broken is not None:
        _drop(graph)
    if begun and not ended:
        _undo_half_an_end(device, pool)
    return broken


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep an old graph or module from being destroyed inside a capture, which would break it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _drop(graph: torch.cuda.CUDAGraph) -> None:
    """Give back what a failed capture holds; a graph that never came to be has nothing."""
    with suppress(RuntimeError):
        graph.reset()


def _undo_half_an_end(device: torch.device, pool: Any) -> None:  # noqa: ANN401
    """Do what ``capture_end`` leaves undone where it fails.

    The allocator would go on serving this stream from the graph's pool (pytorch#180395), and up to
    torch 2.11 the device's default generator believes that it is still being captured: any random
    number of the process then raises "Offset increment outside graph capture encountered
    unexpectedly". A capture that ends well sets the generator right.
    """
    with suppress(RuntimeError):  # it may have come as far as that
        # As torch's own trees do: the pool has one user less, who never came to be.
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)  # noqa: SLF001
        torch._C._cuda_releasePool(device.index or 0, pool)  # noqa: SLF001
    with suppress(RuntimeError):  # what broke the capture is what its caller should hear of
        _capture_one_kernel(device)


def _capture_one_kernel(device: torch.device) -> None:
    one = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with on_stream(stream):
        graph = torch.cuda.CUDAGraph()
        begin_uncounted(graph, capture_error_mode="thread_local")
        one.add_(1)
        graph.capture_end()
    graph.reset()
