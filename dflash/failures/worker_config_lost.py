"""A limit of the compiler that the main thread has set is unknown to the workers.

Symptom
    ``torch._dynamo hit config.recompile_limit (8)`` though the program has set it to 64, once, in
    the log; beyond it calls of the worker run eagerly, at eager's speed and memory. With
    ``fullgraph=True``: ``FailOnRecompileLimitHit``.
Mechanism
    From torch 2.12 on what a program sets in ``torch._dynamo.config``, ``torch._inductor.config``
    or ``torch._functorch.config`` is a ContextVar (torch/utils/_config_module.py), and a new
    ``threading.Thread`` starts with an empty context: workers see the defaults. What is given to
    ``torch.compile(...)`` travels with the function.
Reproduce
    The main thread raises the limit of recompiles to 64, then a worker calls one region with 20
    shapes. Where the fault is, the region is compiled by a plain ``torch.compile``.
Remedy
    ``dflash.execution.compiling.compile_regions``: the limit is an option of the compiled function
    where torch takes it as one. In a run no region meets a new shape in a worker at all.
Verify
    All 20 shapes run compiled code: 0 run eagerly.
Versions
    Seen: 2.11 not, where such settings are the process's; 2.12, 2.13 and 2.14 do: 12 of 20.
Sources
    pytorch#186537, mstar-project/mstar#167, unslothai/unsloth#7019.
"""

from types import SimpleNamespace
from typing import Any

import torch

from dflash.execution import Region
from dflash.execution.compiling import compile_regions
from dflash.failures._mode import FailureMode
from dflash.failures._workers import CompiledCalls, run_workers

NUM_SHAPES = 20
LIMIT = 64


def reproduce(*, faulty: bool, seed: int = 0) -> float:  # noqa: ARG001 - no random numbers here
    """Return how many of a worker's calls, each of a shape of its own, ran eagerly."""
    torch._dynamo.config.recompile_limit = LIMIT  # noqa: SLF001 - the public way to set it
    calls = CompiledCalls()
    program: Any = SimpleNamespace(device=torch.device("cpu"), double=lambda x: x * 2)
    program.regions = lambda: [Region(program, "double", backend=calls.backend)]
    if faulty:  # options stay behind in the main thread
        program.double = torch.compile(program.double, dynamic=False, backend=calls.backend)
    else:
        compile_regions(program, all_of_them=True)

    def work() -> None:
        for size in range(2, 2 + NUM_SHAPES):
            program.double(torch.zeros(size))

    run_workers([work])
    return float(NUM_SHAPES - calls.count)


MODE = FailureMode(
    slug="worker-config-lost",
    measures="calls of a worker, of 20 shapes, that ran eagerly though the limit was set to 64",
    unit="calls",
    limit=0.0,
    reproduce=reproduce,
    remedy=compile_regions,
    child=True,
    affected={"2.11": False, "2.12": True, "2.13": True, "2.14": True},
    detect=lambda run: run.lines_with("FailOnRecompileLimitHit"),
)
