"""While one thread compiles, eager code of every other thread believes that it is being compiled.

Symptom
    No message. Two runs with equal seeds end in weights that differ in their last bits, depending
    on when some other thread compiled; checks that an optimizer makes only outside of the compiler
    are skipped meanwhile.
Mechanism
    From torch 2.13 on ``compile_inner`` (torch/_dynamo/convert_frame.py) sets the global that
    ``torch.compiler.is_compiling()`` returns, for all threads and as long as the compilation
    takes. ``torch.optim``'s ``_get_value`` (torch/optim/optimizer.py) then returns tensors instead
    of Python floats, so a for-loop AdamW computes its bias corrections in fp32 and not in fp64.
Reproduce
    Train a small model alone, then again while another thread compiles, and compare the weights.
    Where the fault is, torch's for-loop AdamW moves them.
Remedy
    ``dflash.train.adamw.adamw_for``: its AdamW is one fused kernel that asks no such question; and
    ``drafter.attention`` asks ``is_dynamo_compiling``, which is the calling thread's own.
Verify
    The weights are bit for bit the same: 0.0.
Versions
    Seen: 2.11 and 2.12 not, 2.13 and 2.14 do.
Sources
    torch/_dynamo/convert_frame.py (``_compile_session_context``), torch/optim/optimizer.py.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dflash.diagnose.timeline import mark
from dflash.execution.compiling import first_compile
from dflash.failures._mode import FailureMode
from dflash.failures._workers import run_workers
from dflash.train.adamw import AdamSettings, adamw_for

WIDTH, BATCH, NUM_STEPS, LR = 16, 8, 200, 1e-3
SETTINGS = AdamSettings(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_norm=1.0)


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return the largest change of a weight that a compiling neighbour makes."""
    first_compile()
    alone = _train(faulty=faulty, seed=seed)
    compiling, trained = threading.Event(), threading.Event()
    weights: list[Tensor] = []

    def slow_backend(graph: Callable[..., Any], _examples: list[Tensor]) -> Callable[..., Any]:
        mark("compile", what="x * 2, for as long as the neighbour trains")
        compiling.set()
        trained.wait()
        return graph

    def compile_slowly() -> None:
        torch.compile(lambda x: x * 2, backend=slow_backend)(torch.ones(2))

    def train() -> None:
        compiling.wait()
        try:
            weights.append(_train(faulty=faulty, seed=seed))
        finally:
            trained.set()

    run_workers([compile_slowly, train])
    return float((weights[0] - alone).abs().max())


def _train(*, faulty: bool, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, generator=random)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random) * WIDTH**-0.5)
    if faulty:  # an optimizer that branches on is_compiling()
        torchs = torch.optim.AdamW([weight], lr=LR, foreach=False)
        move: Callable[[], Any] = torchs.step
    else:
        ours = adamw_for({"weight": weight}, SETTINGS, compute=torch.float32)
        ours.lr.fill_(LR)
        move = lambda: ours.move([gradient])  # noqa: E731
    gradient = weight.grad = torch.zeros_like(weight)
    for _ in range(NUM_STEPS):
        gradient.zero_()
        (x @ weight).square().mean().backward()
        move()
    return weight.detach().clone()


MODE = FailureMode(
    slug="compiling-leak",
    measures="largest change of a weight after 200 steps because another thread compiled meanwhile",
    unit="1 (weight units)",
    limit=0.0,
    reproduce=reproduce,
    remedy=adamw_for,
    child=True,
    affected={"2.11": False, "2.12": False, "2.13": True, "2.14": True},
)
