"""A CUDA graph is captured while another thread uses CUDA, and both threads die.

Symptom
    In the capturing thread ``torch.AcceleratorError: CUDA error: operation failed due to a previous
    error during capture``; in the other one, from an allocation, an event query or a copy of
    its own, ``CUDA error: operation not permitted when stream is capturing``. A pipeline whose
    drafters capture on first use stops at step 0.
Mechanism
    ``torch.cuda.graph`` (torch/cuda/graphs.py) captures with cudaStreamCaptureModeGlobal unless
    told otherwise: until the capture ends, every call of the process that may be unsafe in one
    (cudaMalloc, cudaFree, cudaEventQuery, cudaHostAlloc...) fails with error 900 in whatever thread
    makes it, and breaks the capture, which ends in 901. In thread_local mode only the capturing
    thread is held to that. torch's own trees use it; make_graphed_callables does not. Waiting for
    the whole device (``torch.cuda.synchronize``) breaks a capture of another thread in any mode.
Reproduce
    A drafter's thread captures a whole training step ten times beside a target's thread, which
    multiplies, allocates, frees, queries events and copies from pinned memory. The fault is
    torch's default. Control: a target that allocates at the very moment a global capture is open.
Remedy
    ``dflash.execution.capture``: thread-local mode, no garbage collection inside, an error that
    names the operation, and what a broken capture leaves behind is mended. The trainer also
    captures before any other thread exists.
Verify
    0 threads die.
Versions
    Any torch with CUDA graphs. Seen on one and two H200s with 2.11: both die in global mode,
    whether the target is on the same GPU or on another; none in thread_local or relaxed mode,
    unless the target waits for the device. With 2.14.1 on one: both in 2 of 2 launches, in
    thread_local mode none in 2 of 2.
Sources
    pytorch#146924, pytorch#175425, pytorch#190308
    https://github.com/vllm-project/vllm/pull/48053 (side-stream copies during global captures)
    https://github.com/LibreYOLO/libreyolo/pull/681 (a pin-memory thread dies of a capture)
    https://docs.nvidia.com/dl-cuda-graph/troubleshooting/capture-failures.html
"""

import threading

import torch

from dflash.diagnose.timeline import mark
from dflash.execution import capture
from dflash.failures._mode import FailureMode
from dflash.failures._traffic import MALLOC_BYTES, busy_until, num_dead
from dflash.failures._workers import SmallStep
from dflash.pipeline.lifeline import TICK_S

NUM_CAPTURES, NUM_LAYERS, WAIT_S = 10, 8, 20.0


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many of two threads died of a CUDA error."""
    step = SmallStep(seed=seed, device="cuda", num_layers=NUM_LAYERS)
    stream, begun, over = torch.cuda.Stream(), threading.Event(), threading.Event()

    def body() -> None:
        for part in step.rounds[0]:
            step.parts[part]()

    def drafter() -> None:
        with torch.cuda.stream(stream):  # in this very thread: no capture can make a cuBLAS handle
            body()
            body()
        while not begun.wait(TICK_S) and not over.is_set():
            pass
        for number in range(NUM_CAPTURES):
            mark("capture", number=number)
            if faulty:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):  # the fault: in global mode
                    body()
            else:
                graph = capture(body, device=step.device, stream=stream)
            mark("replay", number=number)
            graph.replay()

    return num_dead(drafter, lambda: busy_until(over, begun), over)


def control(*, seed: int = 0) -> float:
    """Return the same where a target is sure to allocate while a global capture is open."""
    torch.manual_seed(seed)
    opened, tried, stream = threading.Event(), threading.Event(), torch.cuda.Stream()
    x = torch.ones(8, device="cuda")

    def drafter() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            mark("capture")
            opened.set()
            tried.wait(WAIT_S)
            x.add_(1.0)

    def target() -> None:
        opened.wait(WAIT_S)
        mark("cuda", call="cudaMalloc")
        torch.empty(MALLOC_BYTES, dtype=torch.uint8, device="cuda")

    return num_dead(drafter, target, tried)


MODE = FailureMode(
    slug="capture-race",
    measures="threads that die of a CUDA error while one of them captures",
    unit="of 2 threads",
    limit=0.0,
    reproduce=reproduce,
    remedy=capture,
    device="gpu",
    child=True,
    deaths=frozenset({"cuda error", "signal"}),
    chance=True,
    control=control,
    detect=lambda run: run.lines_with(
        "not permitted when stream is capturing", "due to a previous error during capture"
    ),
)
