"""A step compiled for CUDA graphs runs without them, and nobody is told.

Symptom
    ``mode="reduce-overhead"`` is as slow as plain ``torch.compile``, and nothing fails. The reason,
    ``skipping cudagraphs due to mutated inputs (1 instances)`` or ``... cpu device``, is one line
    of the log (artifacts ``perf_hints`` and ``cudagraphs``), where it is shown at all.
Mechanism
    ``log_cudagraph_skip_and_bump_counter`` (torch/_inductor/cudagraph_utils.py) gives a graph up
    when it reads a tensor of the CPU or of a second device, changes an input that is no parameter,
    or holds an operation that no graph can, and launches it instead. Where graphs are partitioned
    (the default) some of these are cut out, which not even the counter notices.
Reproduce
    A training step that torch cannot capture: on a GPU it changes a tensor in place that is
    no static input, on a CPU nothing can be captured at all. Where the fault is, the step is
    compiled and called, as most programs do it; else it is warmed up by production code.
Remedy
    ``dflash.execution.Runner``: its report counts what was skipped, and mode ``warmed`` raises
    CaptureError where nothing was captured. Mode ``graphed`` fails at the very operation.
Verify
    The number of graphs skipped of which nobody was told is 0.
Versions
    Seen on a CPU: 2.11, 2.12, 2.13, 2.14; on an H200 with 2.11 and 2.14.1. It is the program that
    lacks a check, not one torch.
Sources
    pytorch#140395; torch/_inductor/output_code.py (``post_compile``), cudagraph_utils.py.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash.execution import CaptureError, Region, Runner, TrainingStep
from dflash.execution.compiling import compile_regions, num_skipped
from dflash.execution.trees import Trees
from dflash.failures._mode import FailureMode

if TYPE_CHECKING:
    from dflash.diagnose.finished import FinishedRun

WIDTH = 64


def reproduce(*, faulty: bool, seed: int = 0, device: str = "cuda") -> float:
    """Return how many graphs were skipped without a word."""
    step = _Product(seed=seed, device=device)
    if faulty:  # compiled, called, never asked
        compile_regions(step, all_of_them=True, cudagraphs=True)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            for part in step.rounds[0]:
                step.parts[part]()
        told = 0
    else:
        told = _told_by_production(step)
    return float(num_skipped() - told)


def part_on_cpu(*, faulty: bool, seed: int = 0) -> float:
    """The same on a CPU, where every graph is skipped."""
    return reproduce(faulty=faulty, seed=seed, device="cpu")


def _told_by_production(step: TrainingStep) -> int:
    try:
        if step.device.type == "cuda":
            runner = Runner(step, "warmed")
            runner.warm_up()
            runner.enter_worker()
            return runner.report.num_skipped
        trees = Trees(step, warmed=True, unsafe=False)  # a Runner refuses a CPU beforehand
        trees.warm_up()
        trees.enter_worker()
    except CaptureError:
        return num_skipped()
    return 0


class _Product(TrainingStep):
    """Compiles one matrix product, which needs no code of a compiler's own, so no C++ compiler."""

    def __init__(self, *, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        num_calls = torch.zeros((), device=device)

        def product(x: Tensor) -> Tensor:
            if device == "cuda":
                num_calls.add_(1)
            return x @ weight

        self.product = product
        lr = torch.tensor(1e-3, device=device)
        super().__init__(
            lambda inputs: self.product(inputs["x"]).mean(),
            optimizer=torch.optim.AdamW([weight], lr=lr, fused=True, capturable=device == "cuda"),
            inputs={"x": torch.randn(WIDTH, WIDTH, device=device)},
            changed=[num_calls],
        )

    def regions(self) -> list[Region]:
        """The product."""
        return [Region(self, "product")]


def _detect(run: "FinishedRun") -> Iterable[str]:
    yield from run.lines_with('"warmed" captured nothing on', "skipping cudagraphs due to")
    if run.num_skipped:
        yield f"{run.num_skipped} graphs that torch was asked to capture were launched instead"
    for event in run.events("entered"):
        for drafter, report in enumerate(event.detail["drafters"]):
            if report.get("num_skipped"):
                yield f"drafter {drafter}: {report['num_skipped']} graphs skipped at warm-up"


MODE = FailureMode(
    slug="skipped-graphs",
    measures="graphs that were to be captured, were not, and of which nobody was told",
    unit="graphs",
    limit=0.0,
    reproduce=reproduce,
    remedy=Runner,
    device="gpu",
    part_on_cpu=part_on_cpu,
    child=True,
    time_limit_s=180.0,
    detect=_detect,
)
