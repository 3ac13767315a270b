"""What a target's thread does to CUDA beside a drafter's, and who dies of it."""

import threading
from collections.abc import Callable

import torch

from dflash.diagnose.timeline import mark
from dflash.failures._workers import FOREVER_S
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.supervisor import Worker, supervise

MALLOC_BYTES = 1 << 28  # more than the allocator has in its cache


def side_by_side(
    drafter: Callable[[], None], target: Callable[[], None], life: Lifeline | None = None
) -> None:
    """Run both at once, in threads as the pipeline starts and watches them.

    Raises:
        WorkerDiedError: from what ended one of them first.
    """
    workers = [Worker("drafter-0", drafter, decisive=True), Worker("target-0", target)]
    supervise(workers, life or Lifeline(), watchdog_s=FOREVER_S, stacks_file=None)


def busy_until(over: threading.Event, begun: threading.Event | None = None) -> None:
    """Do what a target and a loader do until *over*: nothing that waits for the whole device.

    *begun* is set when everything has been done once.
    """
    weight, host = torch.ones(512, 512, device="cuda"), torch.ones(1 << 16).pin_memory()
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        while not over.is_set():
            mark("cuda", call="cudaMalloc, cudaFree")
            torch.empty(MALLOC_BYTES, dtype=torch.uint8, device="cuda")
            weight = (weight @ weight).clamp(max=1.0)
            host.to("cuda", non_blocking=True)
            event.record()
            event.query()
            torch.cuda.empty_cache()
            if begun is not None:
                begun.set()


def num_dead(
    drafter: Callable[[], None], target: Callable[[], None], over: threading.Event
) -> float:
    """Run both in threads of their own, and count those that a CUDA error ends.

    *over* is set when either has ended. Any other error is raised.
    """
    dead: list[RuntimeError] = []

    def counted(body: Callable[[], None]) -> None:
        try:
            body()
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
            mark("fail", error=str(error).splitlines()[0])
            dead.append(error)
        finally:
            over.set()

    side_by_side(lambda: counted(drafter), lambda: counted(target))
    return float(len(dead))
