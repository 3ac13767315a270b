"""A compiled call in one thread fails while another thread traces, or for ever after.

Symptom
    ``RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized
    function. This is not supported at the moment.`` from a warm step that compiles nothing, while
    a neighbour compiles; with activation checkpointing also from its backward. Sometimes every
    compiled call of the process fails so from then on, with nothing compiling any more.
Mechanism
    ``Tracer.trace`` (torch/fx/_symbolic_trace.py) sets the global ``_is_fx_tracing_flag`` for as
    long as AOTAutograd traces, and ``compile_wrapper`` (torch/_dynamo/eval_frame.py) refuses a call
    where it is set, in any thread and before any lock. Up to 2.12 that kills warm calls. 2.13 looks
    away while anything compiles, but ``_set_compilation_env`` (torch/_higher_order_ops/utils.py),
    which an eager flex_attention enters, saves the flag and restores it: entered during the trace
    of one thread and left after it, it leaves the flag set. 2.14 keeps the flag by thread.
Reproduce
    One drafter's thread repeats a warm compiled step. A second one makes its first step; where the
    fault is, that step was not warmed up and traces for half a second now. A third calls eager
    flex_attention meanwhile. Then the main thread repeats the warm step.
Remedy
    ``dflash.execution.make_ready``: every program is compiled in the main thread before a worker
    exists, and the seal keeps later compilations out. A flag that is stuck stays so until the
    process ends or somebody writes False to it.
Verify
    Not one call of the warm step fails, during the neighbour's first step or after it: 0.
Versions
    Seen: 2.11 and 2.12 during the trace and after it, 2.13 after it only, 2.14 not at all
    (2.14.1 neither with a GPU).
    Checkpointed blocks in three threads on one H200, 2.11: seen in one run of several.
Sources
    pytorch#126024, pytorch#118260, pytorch#105943; torch/_dynamo/eval_frame.py.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx._symbolic_trace import is_fx_tracing

from dflash.diagnose.timeline import mark
from dflash.diagnose.user_program import MakeStep, UserProgram
from dflash.drafter.attention import attend
from dflash.execution import ModeChoice, Program, Runner, make_ready
from dflash.failures._mode import FailureMode
from dflash.failures._workers import SmallStep, run_workers

NUM_CALLS = 20
TRACE_S = 0.5
COMPILED = ModeChoice("compiled", "the mode whose calls fail")


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many calls of a warm step failed while a neighbour made its first and after."""
    return failed_calls(SmallStep(seed=seed), faulty=faulty, seed=seed)


def reproduce_step(make_step: MakeStep, *, faulty: bool, seed: int = 0) -> float:
    """The same where the warm step is a user's."""
    return failed_calls(UserProgram(make_step), faulty=faulty, seed=seed)


def failed_calls(warm: Program, *, faulty: bool, seed: int) -> float:
    """Warm one program or both up, and call *warm* while its neighbour makes its first step."""
    tracing, done = threading.Event(), threading.Event()
    neighbour = SmallStep(seed=seed, before=_slow_to_trace(tracing))
    # The fault: one is left for its worker.
    programs: list[Program] = [warm] if faulty else [warm, neighbour]
    runners = make_ready(programs, COMPILED, streams=[None] * len(programs)).runners
    first = runners[0]
    second = runners[-1] if not faulty else Runner(neighbour, "compiled")
    failed: list[bool] = []

    def repeat() -> None:
        begun_s = time.monotonic()
        while not done.is_set() or len(failed) < NUM_CALLS:
            failed.append(_fails(first))
            if failed[-1] and sum(failed) == 1:
                mark("fail", what="the first call that fails")
        mark("replay", calls=len(failed), for_s=time.monotonic() - begun_s)

    def begin() -> None:
        begun_s = time.monotonic()
        try:
            second("normal")
        finally:
            mark("compile" if faulty else "replay", for_s=time.monotonic() - begun_s)
            tracing.set()
            done.set()

    def attend_eagerly() -> None:
        tracing.wait()
        q_bHQd = torch.zeros(1, 1, 1, 16)
        attend(q_bHQd, q_bHQd, q_bHQd, mask=None, attention="flex")

    run_workers([repeat, begin, attend_eagerly])
    failed += [_fails(first) for _ in range(NUM_CALLS)]
    mark("fail" if failed[-1] else "note", what="calls when all is over", failed=failed[-1])
    return float(sum(failed))


def _fails(runner: Runner) -> bool:
    try:
        runner("normal")
    except RuntimeError as error:
        if "using FX to symbolically trace" not in str(error):
            raise
        return True
    return False


def _slow_to_trace(tracing: threading.Event) -> Callable[[Tensor], Tensor]:
    """Return an operation that AOTAutograd takes TRACE_S to trace, once; *tracing* says so."""

    @torch.library.custom_op("dflash_failures::slow", mutates_args=())
    def slow(x: Tensor) -> Tensor:
        return x.clone()

    @slow.register_fake
    def _(x: Tensor) -> Tensor:
        if is_fx_tracing() and not tracing.is_set():
            tracing.set()
            time.sleep(TRACE_S)
        return torch.empty_like(x)

    return slow


MODE = FailureMode(
    slug="fx-trace-race",
    measures="failed calls of a warm compiled step beside another thread's first one, and after it",
    unit="calls",
    limit=0.0,
    reproduce=reproduce,
    reproduce_step=reproduce_step,
    remedy=make_ready,
    child=True,
    affected={"2.11": True, "2.12": True, "2.13": True, "2.14": False},
    detect=lambda run: run.lines_with("Detected that you are using FX"),
)
