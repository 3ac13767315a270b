"""The compile cache gives a program code that was compiled for another one's static inputs.

Symptom
    ``mode="reduce-overhead"`` captures every batch anew, though its shape has long been known:
    steps that should replay take several times as long, and reserved memory grows with every one,
    until there is none left; or the other way round, buffers that never move are copied before
    every replay. It begins, and ends, with what the cache directory holds. No message.
Mechanism
    A graph of static inputs (``mark_static_address``) reads them where they are and is captured
    again when one has moved. Up to torch 2.12 the key of the AOTAutograd cache leaves out which
    inputs are static (``_reduce_aot_config`` in torch/_functorch/_aot_autograd/autograd_cache.py),
    so that a program that trains on new tensors hits what one with buffers has left, and the
    reverse.
Reproduce
    Two programs of one graph share a cache; one marks its input as static, the other does not.
    Counted is in how many of both orders the second is given the first's code. Where the fault is,
    each compiles with torch.compile, as most programs do; else production compiles them.
Remedy
    ``dflash.execution.Runner``: it names a program's static inputs in an option that is part of the
    key. A ``torch.compile`` of your own: another ``TORCHINDUCTOR_CACHE_DIR`` for one of the two.
Verify
    No program is given another's code: 0.
Versions
    Seen: 2.11 and 2.12 do, 2.13 and 2.14 do not. On an H200 with 2.11 a program of 20 steps
    captured 39 graphs in the place of 3; a step of varying lengths after one of fixed lengths held
    1.9 GiB more after each turn of a bench, and none more with the remedy
    (docs/measurements/bench.md).
Sources
    torch/_functorch/_aot_autograd/autograd_cache.py (AOTAutogradCachePickler),
    torch/_inductor/cudagraph_trees.py (check_invariants); pytorch#175904 (indices of static inputs
    that are off by one have the same symptom).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash.diagnose.timeline import mark
from dflash.execution import Region, Runner, TrainingStep
from dflash.execution.compiling import compile_regions
from dflash.failures._mode import FailureMode

WIDTH = 32
ORDERS = ((True, False), (False, True))
"""Whether each of two programs has a static input."""


def reproduce(*, faulty: bool, seed: int = 0) -> float:
    """Return in how many orders the second program was given the first's code."""
    return float(sum(_given_the_firsts(order, faulty=faulty, seed=seed) for order in ORDERS))


def _given_the_firsts(order: Sequence[bool], *, faulty: bool, seed: int) -> bool:
    from torch._inductor.utils import fresh_cache

    hits = 0
    with fresh_cache():
        for static in order:
            torch.compiler.reset()  # what follows is as good as another process
            hits = _hits_of(_Product(static=static, seed=seed), faulty=faulty)
            mark("compile", static=static, cache_hits=hits)
    return hits > 0


def _hits_of(step: "_Product", *, faulty: bool) -> int:
    from torch._dynamo.utils import counters

    before = counters["aot_autograd"]["autograd_cache_hit"]
    for tensor in step.inputs.values():
        torch._dynamo.mark_static_address(tensor, guard=False)  # noqa: SLF001 - its only name
    if faulty:
        step.product = torch.compile(step.product, mode="reduce-overhead")
    else:
        compile_regions(step, all_of_them=True, cudagraphs=True)
    step.parts["normal"]()
    return int(counters["aot_autograd"]["autograd_cache_hit"] - before)


class _Product(TrainingStep):
    """One matrix product, whose code needs no C++ compiler, on a buffer or on new tensors."""

    def __init__(self, *, static: bool, seed: int) -> None:
        torch.manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        x = torch.randn(WIDTH, WIDTH)
        self.product: Callable[[Tensor], Tensor] = lambda x: x @ weight

        def loss(_inputs: object) -> Tensor:
            return self.product(x if static else x.clone()).mean()

        super().__init__(
            loss,
            optimizer=torch.optim.SGD([weight], lr=1e-3),
            inputs={"x": x} if static else {},
        )

    def regions(self) -> list[Region]:
        """The product."""
        return [Region(self, "product")]


MODE = FailureMode(
    slug="cached-static-input",
    measures="orders in which a program was given code for another one's static inputs",
    unit="of 2 orders",
    limit=0.0,
    reproduce=reproduce,
    remedy=Runner,
    child=True,
    affected={"2.11": True, "2.12": True, "2.13": False, "2.14": False},
)
