"""A shape that warm-up never saw compiles, and captures, in the worker.

Symptom
    Nothing at the default log level. One step takes seconds instead of a millisecond, the next use
    of the shape tens of milliseconds; every other thread that compiles or has a new shape waits.
    On torch up to 2.12 a captured mode may instead end the worker with a bare ``AssertionError``
    (cudagraph-trees).
Mechanism
    A guard of the compiled function fails (torch/_dynamo/guards.py), so that Dynamo compiles
    another version in the thread that calls. Where it does not, the graphs still have one recording
    for each set of sizes (``cudagraphify_impl`` in torch/_inductor/compile_fx.py): no recompile is
    not yet no capture.
Reproduce
    A step is warmed up for its one shape. A drafter's thread then meets a batch that is shorter:
    padded and fed through the runner, in a sealed process; or, for the fault, as it comes.
Remedy
    ``dflash.execution.Runner.feed``: batches are padded to the one static shape, and what has
    another is refused by name. ``dflash.execution.sealed`` makes an error of every compilation and
    capture that begins all the same.
Verify
    0 compilations and captures after warm-up.
Versions
    Any torch. Seen: on a CPU with 2.11 and 2.13 (a new length, batch size 1, another stride, dtype,
    gradient flag or a mask that is None each compile again), and on one H200 with 2.11: 3.9 s in
    place of 1 ms, then 16 ms; with 2.14.1 3 compilations and captures, fixed none.
Sources
    https://github.com/NVIDIA-NeMo/Automodel/pull/2532 (each new anchor count recompiles: stalls of
    seconds, and the NCCL watchdog)
    https://github.com/pytorch/pytorch/issues/141486 (flex attention's mask with changing lengths)
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dflash.diagnose.timeline import mark
from dflash.execution import Mode, Runner, capture_watch, sealed
from dflash.execution.compiling import num_compiled
from dflash.execution.rounds import synchronize
from dflash.failures._mode import FailureMode
from dflash.failures._workers import SmallStep, run_workers

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

NUM_STEPS = 3


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the compilations and captures of a worker on a GPU after its warm-up."""
    step = SmallStep(seed=seed, device="cuda", backend="inductor")
    return _after_warm_up(step, "warmed", faulty=faulty)


def on_cpu(*, faulty: bool, seed: int = 0) -> float:
    """Return the compilations of a worker on a CPU after its warm-up."""
    return _after_warm_up(SmallStep(seed=seed, backend="eager"), "compiled", faulty=faulty)


def _after_warm_up(step: SmallStep, mode: Mode, *, faulty: bool) -> float:
    runner = Runner(step, mode)
    runner.warm_up()
    late = step.inputs["x"][:-3].clone()

    def steps() -> None:
        if faulty:
            step.inputs["x"] = late  # the fault: the batch as long as it comes
            _steps(runner)
        else:
            padded = torch.zeros_like(step.inputs["x"])
            padded[: len(late)] = late
            with sealed():
                runner.feed({"x": padded})
                _steps(runner)

    before = 0

    def enter() -> None:
        nonlocal before
        runner.enter_worker()  # from torch 2.13 on captures here, which is part of warm-up
        before = num_compiled() + capture_watch().total

    run_workers([steps], enter=[enter])
    return float(num_compiled() + capture_watch().total - before)


def _steps(runner: Runner) -> None:
    for number in range(NUM_STEPS):
        begun, compiled = time.perf_counter(), num_compiled()
        with torch.cuda.stream(runner.stream):
            _round(runner)
        synchronize(runner.program.device)
        seconds = time.perf_counter() - begun
        mark("compile" if num_compiled() > compiled else "replay", step=number, for_s=seconds)


def _round(runner: Runner) -> None:
    try:
        for part in ("normal", "update"):
            runner(part)
    except AssertionError as error:
        if str(error):  # an empty one is the trees': they have no state in this thread
            raise
        mark("fail", error="AssertionError, without a message")


def _late(run: "FinishedRun") -> Iterator[str]:
    """What a sealed run refused, and what one that is not sealed made when it had warmed up."""
    yield from run.lines_with(
        "would compile again in thread",
        "graph capture began in thread",
        ", but the program was made ready for",
    )
    for now in run.steady:
        if now.compilations or now.captures:
            made = f"{now.when}: {now.compilations} compilations, {now.captures} captures"
            yield f"{made} since the record before, {now.pace}" if now.pace else made


MODE = FailureMode(
    slug="late-shape",
    measures="compilations and captures in a worker after warm-up",
    unit="compilations and captures",
    limit=0.0,
    reproduce=reproduce,
    remedy=Runner.feed,
    device="gpu",
    part_on_cpu=on_cpu,
    child=True,
    detect=_late,
    time_limit_s=90.0,
)
