"""Threads that compile first, all at once, crash the process or silently run uncompiled.

Symptom
    SIGSEGV right after the workers start; or ``ImportError: cannot import name ... from partially
    initialized module 'torch._inductor...' (most likely due to a circular import)`` and
    ``_DeadlockError: deadlock detected by _ModuleLock('torch._dynamo...')``, which later
    compilations of the main thread then raise too; or nothing but one warning, ``torch._dynamo hit
    config.recompile_limit (8)``, and a run that is as slow as eager.
Mechanism
    torch imports its compiler on the first compiled call, and threads that do so together see
    half-made modules. On 2.11 a first ``FakeTensorMode`` entered by two threads crashes where a
    build for CUDA sees no GPU (torch/_subclasses/fake_tensor.py, ``_ensureCUDADeviceGuardSet``).
    Whether code has to be compiled is decided before the lock is taken
    (torch/_dynamo/convert_frame.py), so every thread that waited compiles the same function again;
    from 2.13 on the ninth and later ones reach the limit of 8 versions and run eagerly.
Reproduce
    Sixteen drafters call one compiled loss at once. Where the fault is, nothing was compiled
    before; without it every drafter's program is made ready in the main thread first.
Remedy
    ``dflash.execution.make_ready``: the first compilation of the process happens alone, in the main
    thread, and each program compiles a code object of its own (``compiling.own_code``).
Verify
    Every worker's step runs compiled code: 0 of 16 do not, and none dies.
Versions
    Seen without a GPU: 2.11 crashes (SIGSEGV, 13 of 13 launches), 2.13 and 2.14 run 7 or 8 of 16
    workers eagerly (10 of 10 each), 2.12 does neither (0 of 13). Beside an H200: 2.11 does neither
    (0 of 5), and crashes where the H200 is hidden (5 of 5). Reported: the import race, also on
    2.10.
Sources
    pytorch#136833, pytorch#123177, unslothai/unsloth#10350.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.diagnose.timeline import mark
from dflash.execution import ModeChoice, make_ready
from dflash.failures._mode import FailureMode
from dflash.failures._workers import CompiledCalls, SmallStep, run_workers

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

NUM_WORKERS = 16
COMPILED = ModeChoice("compiled", "the mode whose first call is dangerous")


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many workers' steps ran eagerly."""
    calls = CompiledCalls()
    steps = [SmallStep(seed=seed, backend=calls.backend) for _ in range(NUM_WORKERS)]
    first: list[Callable[[], Tensor]]
    if faulty:  # every worker compiles for itself, all of them the same function
        first = [partial(_compile_and_call, steps[0])] * NUM_WORKERS
    else:
        make_ready(steps, COMPILED, streams=[None] * NUM_WORKERS)
        first = [partial(step.loss, step.inputs) for step in steps]
    together = threading.Barrier(NUM_WORKERS)

    def body(call: Callable[[], Tensor]) -> None:
        together.wait()
        mark("compile", whose="loss")
        call()

    calls.count = 0
    run_workers([partial(body, call) for call in first])
    return float(NUM_WORKERS - calls.count)


def _compile_and_call(step: SmallStep) -> Tensor:
    loss: Tensor = torch.compile(step.loss, dynamic=False, backend=step.backend)(step.inputs)
    return loss


def _detect(run: "FinishedRun") -> Iterable[str]:
    yield from run.lines_with(
        "from partially initialized module 'torch.", "deadlock detected by _ModuleLock('torch"
    )
    if "torch/_dynamo/convert_frame.py" in run.text:
        yield from run.lines_with("Fatal Python error: Segmentation fault")


MODE = FailureMode(
    slug="first-compile-crash",
    measures="workers, of 16, whose first step ran eagerly though it was compiled",
    unit="workers",
    limit=0.0,
    reproduce=reproduce,
    remedy=make_ready,
    child=True,
    chance=True,
    deaths=frozenset({"signal", "hang", "exception"}),
    affected={"2.11": True, "2.11 with a GPU": False, "2.12": False, "2.13": True, "2.14": True},
    detect=_detect,
)
