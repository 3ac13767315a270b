"""Without a step mark, an output is overwritten before the step that made it has ended.

Symptom
    ``RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a
    subsequent run.`` with the advice to clone or to call
    ``torch.compiler.cudagraph_mark_step_begin()``. Or none: where another thread's mark falls
    between two calls of a step, the first one's output is gone while the second is warmed up and
    recorded, and *wrong* without a word in every step after.
Mechanism
    Cudagraph trees reuse the memory of outputs when a new generation begins
    (``can_start_new_generation`` in torch/_inductor/cudagraph_trees.py). Without marks every
    top-level compiled call that has no pending backward begins one, so a step of two calls gives up
    the first one's output in the second. The counter is the process's, not the thread's: a call or
    a mark in *any* thread counts. A mark prevents no overwriting; it says when it may happen.
    A call recorded after another thread's mark is a root of its own, in the memory of the output
    that was given up, and a replay of it ends no step aloud (``try_end_curr_execution``). Recorded
    as a child, before any such mark, it stays one: later marks change nothing, nor does a compiled
    call of the other thread.
Reproduce
    A step of two calls of one compiled function, whose results are added up: six times, by the mode
    that marks the first part of every round. The fault takes the mark away. Counted are the steps
    whose first output is gone (GPU), or of another generation than the second (CPU).
Remedy
    ``dflash.execution.trees.Trees.run``: a mark before each round and nowhere else, and parts of
    all programs take turns, since one program's mark would end the step of another.
Verify
    0 steps lose an output.
Versions
    Seen: the error on one H200 with 2.11, in inference and training, and with 2.14.1; the silent
    form with both (docs/measurements/programs/generation_other_thread.py); the process-wide counter
    on a CPU with 2.11, 2.13 and 2.14. 2.13 adds a text for gradients, 2.14 a setting that clones
    (cudagraph_trees_generation_cloning).
Sources
    https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_cudagraph_trees.html
    pytorch#169545, pytorch#170604, pytorch#152887
"""

from collections.abc import Callable

import torch

from dflash.diagnose.timeline import mark
from dflash.execution import Runner
from dflash.execution.trees import Trees
from dflash.failures._mode import FailureMode
from dflash.failures._workers import SmallStep

NUM_STEPS = 6


class _TwoCalls(SmallStep):
    """A round calls the compiled function twice and needs both results; counts those lost."""

    rounds = (("first", "second"),)
    lost = 0

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        return {"first": self._first, "second": self._second}

    @torch.no_grad()
    def _first(self) -> None:
        self._kept, self._generation = self.loss(self.inputs), _generation()

    @torch.no_grad()
    def _second(self) -> None:
        other = self.loss(self.inputs)
        lost = not other.is_cuda and _generation() != self._generation
        try:
            float(self._kept + other)
        except RuntimeError as error:
            if "has been overwritten" not in str(error):
                raise
            lost = True
            mark("fail", error=str(error).splitlines()[0])
        self.lost += lost


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the steps that lost the output of their first call on a GPU."""
    program = _TwoCalls(seed=seed, device="cuda", backend="inductor")
    runner = Runner(program, "reduce-overhead")
    runner.warm_up()
    with torch.cuda.stream(runner.stream):
        return _steps(program, runner, faulty=faulty)


def on_cpu(*, faulty: bool, seed: int = 0) -> float:
    """Return the steps whose two calls are of different generations; nothing is captured."""
    program = _TwoCalls(seed=seed, backend="eager")
    trees = Trees(program, warmed=False, unsafe=False)
    trees.warm_up()
    return _steps(program, trees.run, faulty=faulty)


def _steps(program: _TwoCalls, run: Callable[[str], None], *, faulty: bool) -> float:
    if faulty:
        torch.compiler.cudagraph_mark_step_begin = lambda: None  # the fault: no step ever begins
    for number in range(NUM_STEPS):
        for part in program.rounds[0]:
            run(part)
            mark("replay", part=part, step=number)
    return float(program.lost)


def _generation() -> int:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    return CUDAGraphTreeManager.get_curr_generation()


MODE = FailureMode(
    slug="missing-step-mark",
    measures="steps that lose the output of their first call before they end",
    unit="of 6 steps",
    limit=0.0,
    reproduce=reproduce,
    remedy=Trees.run,
    device="gpu",
    part_on_cpu=on_cpu,
    child=True,
    detect=lambda run: run.lines_with("CUDAGraphs that has been overwritten"),
    time_limit_s=90.0,
)
