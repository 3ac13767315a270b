"""The trainer's own step on random features and weights, as a subject that takes turns."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch

from dflash.drafter.head import scaled_head
from dflash.drafter.model import Drafter
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.training import BlockLoss, StepInputs
from dflash.execution import SEALABLE, Mode, Runner, process_seal
from dflash.train.adamw import AdamSettings
from dflash.train.logbook import GIB
from dflash.train.step import TrainStep
from dflash.train.totals import averages
from dflash_bench.kernels import profile_steps
from dflash_bench.shapes import SHAPES, BenchShape
from dflash_bench.timing import time_steps

Result = TypeVar("Result")
Matmul = Literal["bf16", "fp8"]  # as precision.matmul
LR = 1e-4
LEAD_IN_STEPS = 2
"""Untimed at the start of a turn: caches and clocks are those of whoever had the turn before."""

METRIC_STEPS = 10
PROFILED_STEPS = 3


def make_step(
    shape: BenchShape, *, device: torch.device, seed: int = 0, matmul: Matmul = "bf16"
) -> TrainStep:
    """Build a training step on a batch of random features; bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device).manual_seed(seed)
    drafter = Drafter(shape.drafter)
    drafter.initialise(seed)
    drafter.to(device)
    hidden, vocabulary = shape.drafter.hidden_size, shape.drafter.vocab_size
    embedding_VD, lm_head_VD = (
        torch.empty(vocabulary, hidden, device=device, dtype=dtype).normal_(
            std=0.02, generator=random
        )
        for _ in range(2)
    )
    loss = BlockLoss(
        drafter,
        embedding_VD=embedding_VD,
        head=scaled_head(lm_head_VD) if matmul == "fp8" else lm_head_VD,
        settings=ObjectiveSettings(kind="decay", gamma=7.0),
        num_anchors=shape.num_anchors,
        seed=seed,
        attention="split" if device.type == "cpu" else "flex",
    )
    inputs = random_inputs(shape, device=device, dtype=dtype, generator=random)
    settings = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0)
    step = TrainStep(loss, settings, token_budget=shape.token_budget, features_dtype=dtype)
    for name, tensor in inputs._asdict().items():
        step.inputs[name].copy_(tensor)
    return step


def random_inputs(
    shape: BenchShape, *, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> StepInputs:
    """Return random features and tokens of documents of equal length, all supervised."""
    num_tokens, length = shape.token_budget, shape.token_budget // shape.num_documents
    position = torch.arange(num_tokens, device=device)
    width = shape.drafter.num_taps * shape.drafter.hidden_size
    return StepInputs(
        features_TC=torch.randn(num_tokens, width, device=device, dtype=dtype, generator=generator),
        tokens_T=torch.randint(
            0, shape.drafter.vocab_size, (num_tokens,), device=device, generator=generator
        ),
        documents_T=(position // length).clamp(max=shape.num_documents - 1),
        positions_T=position % length,
        loss_mask_T=torch.ones(num_tokens, device=device, dtype=torch.bool),
        batch_number=torch.zeros((), device=device, dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one process measures: a shape by its name, one mode, one device."""

    shape: str
    mode: Mode
    device: str
    turn_steps: int
    profile: bool = False
    seed: int = 0
    matmul: Matmul = "bf16"


class DrafterStep:
    """A subject: warm-up in this thread, every step in a worker's, as in a run.

    The same steps in the same order in every mode: one in ``prepare``, ``LEAD_IN_STEPS`` and
    ``turn_steps`` in every turn, one in ``finish``; their batch numbers count from 0. So losses of
    modes can be compared.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.device = torch.device(plan.device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="drafter")
        self._number = 0

    def build(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.step = make_step(
            SHAPES[self.plan.shape],
            device=self.device,
            seed=self.plan.seed,
            matmul=self.plan.matmul,
        )
        return {"build_s": time.perf_counter() - started}

    def prepare(self) -> dict[str, Any]:
        self.runner = Runner(self.step, self.plan.mode)
        self.runner.warm_up()
        self._worker.submit(self.runner.enter_worker).result()
        if self.plan.mode in SEALABLE:
            process_seal().close()
        self._allocs_before = self._memory("num_device_alloc")
        self._steps(1)
        return {"loss_first": self._loss()}

    def turn(self) -> list[float]:
        times_ms = self._steps(LEAD_IN_STEPS + self.plan.turn_steps)
        return times_ms[LEAD_IN_STEPS:]

    def finish(self) -> dict[str, Any]:
        self._loss()
        self._steps(1)
        loss, steps = self._loss(), self._number
        metric_ms = self._steps(LEAD_IN_STEPS + METRIC_STEPS, part="metric")[LEAD_IN_STEPS:]
        found: dict[str, Any] = {
            "loss_last": loss,
            "steps_to_loss_last": steps,
            "metric_step_ms_median": statistics.median(metric_ms),
            "device_allocs_after_warm_up": self._memory("num_device_alloc") - self._allocs_before,
            "peak_allocated_gib": self._memory("allocated_bytes.all.peak") / GIB,
            "peak_reserved_gib": self._memory("reserved_bytes.all.peak") / GIB,
            "warm_up": self.runner.report.as_record(),
        }
        if self.plan.profile:
            seen = profile_steps(self._steps, count=PROFILED_STEPS, device=self.device)
            found |= {"profile": asdict(seen), "profile_text": seen.text()}
        return found

    def _steps(self, count: int, *, part: Literal["normal", "metric"] = "normal") -> list[float]:
        return self._in_worker(
            lambda: time_steps(lambda _: self._one_step(part), count, self.device)
        )

    def _one_step(self, part: str) -> None:
        self.step.batch.batch_number.fill_(self._number)
        self.runner(part)
        self.step.set_lr(LR)
        self.runner("update")
        self._number += 1

    def _loss(self) -> float | None:
        """The average since this was asked last, and the end of every step so far."""

        def read() -> float | None:
            found = averages(self.step.totals.sums.cpu()).loss
            self.step.totals.zero()
            return found

        return self._in_worker(read)

    def _in_worker(self, body: Callable[[], Result]) -> Result:
        def on_stream() -> Result:
            with torch.cuda.stream(self.runner.stream):
                return body()

        return self._worker.submit(on_stream).result()

    def _memory(self, figure: str) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device)[figure])
