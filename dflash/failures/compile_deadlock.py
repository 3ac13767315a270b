"""Several threads make their first compiled attention at once on one GPU, and all wait for ever.

Symptom
    Nothing: no message, no load on the GPU, 0 tok/s. ``py-spy dump`` or faulthandler shows one
    thread in ``create_fw_bw_graph`` under ``autograd.grad``, and the device's autograd thread in
    ``compile_fx_backward``.
Mechanism
    Thread A holds the compile lock (``compile_lock`` in torch/_dynamo/convert_frame.py) while it
    traces flex attention. For the joint graph it calls ``torch.autograd.grad`` on the device
    (``create_fw_bw_graph`` in torch/_higher_order_ops/flex_attention.py), whose one autograd thread
    serves the whole process. That thread is in the backward pass of B, which compiles lazily and
    waits for the compile lock (``compile_fx_backward`` in torch/_inductor/compile_fx.py).
Reproduce
    Four drafters' threads, each the forward and backward pass of a small drafter with tiled
    attention on one GPU. Before, the main thread makes all four ready; the fault leaves that out.
Remedy
    ``dflash.execution.make_ready``: everything is compiled in the main thread, one program after
    another, before a worker exists; the seal makes an error of what would compile later.
Verify
    All four threads come to their end: 0 are left when the launch is over.
Versions
    Seen on one H200 with 2.11, own and shared wrappers. Not seen with one GPU for each of two
    threads (a device has an autograd thread of its own), and not possible on a CPU, where the
    backward pass runs in the calling thread. Seen on one H200 with 2.14.1: 2 of 2 launches stood
    still for 60 s in the two places named above, and 4 of 4 for 75 s; remedied, 0 of 4. 2.12 and
    2.13: not known.
Sources
    torch/_higher_order_ops/flex_attention.py, torch/_inductor/compile_fx.py of 2.11 and 2.14.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from dflash.diagnose.timeline import mark
from dflash.execution import ModeChoice, Runner, make_ready
from dflash.failures._example import packed_batch, small_loss
from dflash.failures._mode import FailureMode
from dflash.failures._workers import run_workers
from dflash.train.adamw import AdamSettings
from dflash.train.step import TrainStep

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

NUM_DRAFTERS, NUM_ANCHORS, LENGTHS = 4, 16, [100, 28]
EAGER = ModeChoice("eager", "tiled attention is compiled in every mode")
SETTINGS = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return how many threads have not come to their end; hang where they wait for each other."""
    steps = [_step(seed + number) for number in range(NUM_DRAFTERS)]
    if faulty:
        runners = [Runner(step, "eager") for step in steps]  # the fault: nothing is made ready
    else:
        runners = make_ready(steps, EAGER, streams=[None] * NUM_DRAFTERS).runners
    ended: list[Runner] = []

    def drafter(runner: Runner) -> None:
        mark("compile")
        with torch.cuda.stream(runner.stream):
            runner("normal")
            torch.cuda.current_stream().synchronize()
        mark("note", text="this thread has come to its end")
        ended.append(runner)

    run_workers([partial(drafter, runner) for runner in runners])
    return float(NUM_DRAFTERS - len(ended))


def _step(seed: int) -> TrainStep:
    dtype = torch.bfloat16
    loss = small_loss(
        num_anchors=NUM_ANCHORS,
        seed=seed,
        device=torch.device("cuda", 0),
        dtype=dtype,
        attention="flex",
        num_layers=1,  # a second call may meet a neighbour's trace: fx-trace-race, which is louder
    )
    step = TrainStep(loss, SETTINGS, token_budget=sum(LENGTHS), features_dtype=dtype)
    for name, tensor in packed_batch(LENGTHS, seed=seed, dtype=dtype)._asdict().items():
        step.inputs[name].copy_(tensor)
    return step


def _stacks(run: "FinishedRun") -> list[str]:
    """Both sides of the deadlock, or nothing: each alone is a compilation that goes on."""
    sides = [list(run.lines_with(side)) for side in ("create_fw_bw_graph", "compile_fx_backward")]
    return sides[0][:1] + sides[1][:1] if all(sides) else []


MODE = FailureMode(
    slug="compile-deadlock",
    measures="threads that have not come to their end",
    unit="of 4 threads",
    limit=0.0,
    reproduce=reproduce,
    remedy=make_ready,
    device="gpu",
    child=True,
    deaths=frozenset({"hang"}),
    chance=True,
    affected={"2.11": True, "2.14": True},
    time_limit_s=75.0,
    detect=_stacks,
)
