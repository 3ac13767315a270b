"""A random number in one thread, while another captures a graph, is an error.

Symptom
    ``RuntimeError: Offset increment outside graph capture encountered unexpectedly.`` from a
    dropout, a ``torch.rand`` or a ``randperm`` of a thread that captures nothing, whatever the
    capture's error mode is. After a broken capture every later random number fails so.
Mechanism
    The device's default generator is one for the process. ``capture_begin`` registers it and sets
    its ``capturing_`` (ATen/cuda/CUDAGraph.cpp, CUDAGeneratorImpl.cpp); up to torch 2.11 that is a
    single bool of the generator, so a draw on a stream that is not being captured looks like a
    draw that escaped from the capture. From 2.12 on it is kept for each capture.
Reproduce
    A drafter's thread captures. While the capture is open, a target's thread draws scores for the
    anchors of ten batches: by the production function or, for the fault, from the generator.
Remedy
    ``dflash.drafter.anchors.anchor_scores``: a pure function of seed, batch and position. The
    trainer asks no CUDA generator for anything, so there is no state to capture or to restore.
Verify
    0 draws fail.
Versions
    Seen on an H200 with 2.11, in every error mode of the capture; not with 2.14.1, in one launch of
    the faulty program (0 of 10 draws). Read in the sources: 2.9 to 2.11 one flag a generator, from
    2.12 one state a capture (pytorch#176752). pytorch#176754, to make the rest safe for threads, is
    open.
Sources
    https://github.com/huggingface/diffusion-fast/issues/12 (concurrent requests: an older message)
    pytorch#176752, pytorch#176754, pytorch#162504
"""

import threading
from collections.abc import Callable

import torch

from dflash.diagnose.timeline import mark
from dflash.drafter.anchors import anchor_scores
from dflash.execution import capture
from dflash.failures._mode import FailureMode
from dflash.failures._traffic import side_by_side

NUM_BATCHES, NUM_POSITIONS, WAIT_S = 10, 4096, 20.0


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many of ten draws failed while another thread captured."""
    opened, drawn, stream = threading.Event(), threading.Event(), torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    torch.cuda.manual_seed(seed)
    failed: list[bool] = []

    def body() -> None:
        mark("capture")
        opened.set()
        drawn.wait(WAIT_S)
        x.add_(1.0)

    def drafter() -> None:
        capture(body, device=x.device, stream=stream).replay()

    def draw(number: int) -> None:
        if faulty:
            torch.rand(NUM_POSITIONS, device="cuda")  # the fault: from the process's generator
        else:
            anchor_scores(seed, number, num_positions=NUM_POSITIONS, device="cuda")

    def target() -> None:
        opened.wait(WAIT_S)
        try:
            failed.extend(_fails(draw, number) for number in range(NUM_BATCHES))
        finally:
            drawn.set()

    draw(0)  # what is created on first use, no capture should see
    side_by_side(drafter, target)
    return float(sum(failed))


def _fails(draw: Callable[[int], None], number: int) -> bool:
    mark("cuda", draw=number)
    try:
        draw(number)
    except RuntimeError as error:
        if "graph capture" not in str(error):
            raise
        mark("fail", error=str(error).splitlines()[0])
        return True
    return False


MODE = FailureMode(
    slug="rng-in-capture",
    measures="random draws that fail while another thread captures",
    unit="of 10 draws",
    limit=0.0,
    reproduce=reproduce,
    remedy=anchor_scores,
    device="gpu",
    child=True,
    detect=lambda run: run.lines_with("Offset increment outside graph capture"),
    affected={"2.9": True, "2.10": True, "2.11": True, "2.12": False, "2.13": False, "2.14": False},
)
