"""Two drafters run the same captured graph, and each reads what the other wrote into it.

Symptom
    No message: gradients of a worker belong, in part, to its neighbour's batch, or are noise. Or
    one that speaks of something else: ``accessing tensor output of CUDAGraphs that has been
    overwritten by a subsequent run``, ``Trying to backward through the graph a second time``,
    ``invalid device pointer``; from 2.13 on ``[..] gradient tensor output of CUDAGraphs [..]``,
    ``tensor(s) in the cudagraph pool not tracked as outputs``, or ``observed an input tensor
    deallocate [..] that did not occur during replay`` (checkpoints alone, too: pytorch#154306).
Mechanism
    A graph has one set of addresses. ``compile_fx.cudagraphify`` keeps it in a closure: up to torch
    2.12 one for all threads, so that what one thread warmed all replay. From 2.13 on it is the
    calling thread's; but all backward passes of a GPU run in its one autograd thread, bound to the
    tree manager of whoever came first, while each worker's forward is in a manager of its own.
    With no step mark between them, ``CUDAGraphTreeManager._run`` records B's backward as a child of
    A's. If A drops its gradients meanwhile, ``CUDAGraphNode._add_first_outputs`` takes that for B's
    doing, and ``check_invariants`` demands it of every replay: the last of these messages.
    Two ``torch.compile`` of one function share the compiled code, hence all of this.
Reproduce
    Two workers, each with a batch of its own; where the fault is, they share one compiled function.
    On a GPU gradients are compared with eager ones. On a CPU torch's own closures run around a
    manager that notes who replays what, and a thread with the caller's entries plays autograd's.
Remedy
    ``dflash.execution.Runner``: one for each worker, on a code object of its own
    (``compiling.own_code``), and in mode ``graphed`` graphs and a pool of its own.
Verify
    On a CPU, no graph is run by two workers: 0. On a GPU, gradients differ from eager ones by at
    most rounding, 1e-3 of the largest.
Versions
    Seen on a CPU: 2.11 and 2.12 (forward and backward), 2.13 and 2.14 (backward only).
    Seen on an H200: a worker dies in 4 of 4 launches with 2.11, in 9 of 9 with 2.14.1; remedied,
    gradients are off by 1.8e-7. docs/measurements/programs/cross_wired_backward.py: by 8e5.
Sources
    pytorch#123177, pytorch#184357; torch/_inductor/compile_fx.py, cudagraph_trees.py of 2.14.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dflash.diagnose.timeline import mark
from dflash.execution import Runner, behaviour_of
from dflash.failures._mode import FailureMode
from dflash.failures._trees import AutogradThread, StandInManager, stand_in_graph
from dflash.failures._workers import SmallStep, largest_error, run_workers

NUM_WORKERS, NUM_STEPS, NUM_WARM_CALLS, WIDTH = 2, 100, 3, 1024
LIMIT = 1e-3
LOST = 1.0  # of a gradient that a worker never got, as if it were nought
SYMPTOMS = ("has been overwritten", "backward through the graph a second", "invalid device pointer",
            "observed an input tensor deallocate", "not tracked as outputs")  # fmt: skip

GradientsOf = Callable[[Tensor], list[Tensor]]


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the largest error of a gradient, relative to the largest gradient."""
    new = partial(SmallStep, seed=seed, width=WIDTH, device="cuda", backend="inductor")
    steps = [new() for _ in range(NUM_WORKERS)]
    batches = [torch.randn_like(step.inputs["x"]) * (n + 1) for n, step in enumerate(steps)]
    loss = steps[0].loss
    expected = [steps[0].gradients_of(x, loss=loss) for x in batches]
    runners = [Runner(step, "graphed") for step in steps]
    gradients_of: list[GradientsOf] = [partial(_by_runner, runner) for runner in runners]
    if faulty:  # one compiled function for both workers, warmed here
        shared = torch.compile(loss, dynamic=False, mode="reduce-overhead")
        gradients_of = [partial(steps[0].gradients_of, loss=shared)] * NUM_WORKERS
        for _ in range(NUM_WARM_CALLS):
            gradients_of[0](batches[0])
    else:
        for runner in runners:
            runner.warm_up()
    torch.cuda.synchronize()
    worst = [0.0] * NUM_WORKERS

    def work(worker: int) -> None:
        with torch.cuda.stream(runners[worker].stream):
            for _ in range(NUM_STEPS):
                error = error_of(gradients_of[worker], batches[worker], expected[worker])
                worst[worker] = max(worst[worker], error)
                if max(worst) >= LOST:  # of a worker that goes on alone nothing is known
                    return

    run_workers([partial(work, worker) for worker in range(NUM_WORKERS)])
    return max(worst)


def error_of(gradients_of: GradientsOf, x: Tensor, expected: list[Tensor]) -> float:
    """Return the largest error of one step's gradients, LOST where a symptom ended the step."""
    try:
        gradients = gradients_of(x)
    except RuntimeError as error:
        if not any(symptom in str(error) for symptom in SYMPTOMS):
            raise
        mark("fail", error=str(error).splitlines()[0])
        return LOST
    return largest_error(gradients, expected)


def _by_runner(runner: Runner, x: Tensor) -> list[Tensor]:
    runner.feed({"x": x})
    runner("normal")
    return [gradient.clone() for gradient in runner.program.carried() if gradient is not None]


def part_on_cpu(*, faulty: bool, seed: int = 0) -> float:  # noqa: ARG001 - nothing random
    """Return how many captured graphs were run by two workers."""
    graphs = [(stand_in_graph(), stand_in_graph(is_backward=True)) for _ in range(NUM_WORKERS)]
    if faulty:
        graphs = [graphs[0]] * NUM_WORKERS
    autograd = AutogradThread()

    def step(name: str, forward: Callable[..., object], backward: Callable[..., object]) -> None:
        forward([name])
        autograd.run(partial(backward, [name]))

    if behaviour_of(torch.__version__).captures_in == "main":  # as mode "warmed" does
        for forward, backward in graphs:
            step("main", forward, backward)
    run_workers([partial(step, f"drafter-{n}", *pair) for n, pair in enumerate(graphs)])
    return float(sum(len(users - {"main"}) > 1 for users in StandInManager.captured))


MODE = FailureMode(
    slug="cross-thread-replay",
    measures="error of a worker's gradients (on a CPU: graphs that two workers ran)",
    unit="1, relative",
    limit=LIMIT,
    reproduce=reproduce,
    remedy=Runner,
    device="gpu",
    part_on_cpu=part_on_cpu,
    child=True,
    time_limit_s=180.0,
    chance=True,
    deaths=frozenset({"cuda error", "signal"}),
    affected={"2.11": True, "2.12": True, "2.13": True, "2.14": True},
)
