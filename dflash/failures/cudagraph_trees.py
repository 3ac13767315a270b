"""Drafters that capture on first use die at it, all but one, of an error without a message.

Symptom
    A bare ``AssertionError`` with no text in some worker threads, deep under
    ``cudagraph_trees.get_obj``. One worker survives; the rest of the pipeline waits for the dead
    ones at 0 tok/s. In a thread pool the error stays in a future that nobody reads.
Mechanism
    Up to torch 2.12 torch/_inductor/cudagraph_trees.py puts its managers into a thread local when
    it is imported, so only in the importing thread, and ``get_obj`` asserts that they are there.
    ATen carries them to autograd's threads, never to a ``threading.Thread``. Only a first capture
    asks for them: what was captured before may be replayed by any thread. From 2.13 on every
    thread makes managers of its own, and captures everything again.
Reproduce
    Three drafters' threads take three training steps each, compiled with ``reduce-overhead``.
    Where the fault is, each captures on first use. On a CPU the real torch code looks for a manager
    that only counts.
Remedy
    ``dflash.execution.Runner`` with mode ``graphed``, which has no trees, or ``warmed``, which
    captures in the thread that the installed torch wants. Mode ``reduce-overhead`` is refused for
    several drafters on a torch that has this (``dflash.execution.choose_mode``).
Verify
    The number of workers that die is 0 of 3.
Versions
    Seen on an H200: 2.11 does (2 of 3 die), 2.14.1 does not (0 of 3). Seen on a CPU: 2.11 and 2.12
    do, 2.13 and 2.14 do not.
    Read: 2.9 and 2.10 do.
Sources
    pytorch#123177, pytorch#184357 (the repair), OpenBMB/VoxCPM#208.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from dflash.diagnose.timeline import mark
from dflash.diagnose.user_program import MakeStep, UserProgram
from dflash.execution import Mode, Program, Runner, behaviour_of
from dflash.failures._mode import FailureMode
from dflash.failures._trees import stand_in_graph
from dflash.failures._workers import Body, SmallStep, run_workers

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

NUM_WORKERS, NUM_STEPS = 3, 3


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many of three workers died of the assertion, on one GPU."""
    steps = [SmallStep(seed=seed, device="cuda", backend="inductor") for _ in range(NUM_WORKERS)]
    return num_dead(steps, faulty=faulty)


def reproduce_step(make_step: MakeStep, *, faulty: bool, seed: int = 0) -> float:  # noqa: ARG001
    """The same where each worker has a user's step of its own."""
    return num_dead([UserProgram(make_step) for _ in range(NUM_WORKERS)], faulty=faulty)


def num_dead(steps: Sequence[Program], *, faulty: bool) -> float:
    """Let each worker run a program of its own, captured beforehand or on first use."""
    mode: Mode = "reduce-overhead" if faulty else "graphed"  # the fault: captured on first use
    runners = [Runner(step, mode, unsafe=True) for step in steps]
    for runner in runners:
        runner.warm_up()

    def work(runner: Runner) -> None:
        with torch.cuda.stream(runner.stream):
            for part in NUM_STEPS * list(runner.program.rounds[0]):
                runner(part)
            torch.cuda.current_stream().synchronize()

    bodies = [partial(work, runner) for runner in runners]
    return num_asserted(bodies, enter=[runner.enter_worker for runner in runners])


def part_on_cpu(*, faulty: bool, seed: int = 0) -> float:  # noqa: ARG001 - nothing random
    """Return how many of three workers find no manager; torch's own code looks for it."""
    graphs = [stand_in_graph() for _ in range(NUM_WORKERS)]
    captures_in = behaviour_of(torch.__version__).captures_in
    if not faulty and captures_in == "main":  # as mode "warmed" does
        for graph in graphs:
            graph([])
    return num_asserted([partial(graph, []) for graph in graphs])


def num_asserted(bodies: Sequence[Callable[[], object]], *, enter: Sequence[Body] = ()) -> float:
    """Run *bodies* in workers and count those that end in an assertion without a message."""
    dead: list[str] = []

    def guarded(body: Callable[[], object]) -> None:
        mark("capture", when="on first use, where the worker has nothing to replay")
        try:
            body()
        except AssertionError as error:
            if str(error):
                raise
            mark("fail", error="AssertionError")
            dead.append(threading.current_thread().name)

    run_workers([partial(guarded, body) for body in bodies], enter=enter)
    return float(len(dead))


def _asserted(run: "FinishedRun") -> Iterator[str]:
    """The assertion's line of a traceback, or our own words about it; not a thread passing by."""
    yield from run.lines_with("get_obj in torch/_inductor/cudagraph_trees")
    for line in run.lines_with(", in get_obj"):
        if "torch/_inductor/cudagraph_trees.py" in line:
            yield line


MODE = FailureMode(
    slug="cudagraph-trees",
    measures="workers, of 3, that die of a bare AssertionError at their first capture",
    unit="workers",
    limit=0.0,
    reproduce=reproduce,
    reproduce_step=reproduce_step,
    remedy=Runner,
    device="gpu",
    part_on_cpu=part_on_cpu,
    child=True,
    time_limit_s=180.0,
    detect=_asserted,
    affected={"2.11": True, "2.12": True, "2.13": False, "2.14": False},
)
