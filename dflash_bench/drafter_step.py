"""One optimizer step of the drafter on given features, on random weights.

``python -m dflash_bench.drafter_step --shape qwen3-8b-3072 --mode compiled`` prints one JSON
object: milliseconds by CUDA events, peaks, device allocations after warm-up, and the rate of a
large matrix product measured in the same process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from dflash.drafter.model import Drafter
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.training import BlockLoss, StepInputs
from dflash.execution import Mode, Runner
from dflash.train.logbook import GIB
from dflash.train.adamw import AdamSettings
from dflash.train.step import TrainStep
from dflash.train.totals import averages
from dflash_bench.shapes import SHAPES, BenchShape

Signature = Literal["normal", "metric"]


def make_step(shape: BenchShape, *, device: torch.device, seed: int = 0) -> TrainStep:
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
        lm_head_VD=lm_head_VD,
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
            0, shape.drafter.mask_token_id, (num_tokens,), device=device, generator=generator
        ),
        documents_T=(position // length).clamp(max=shape.num_documents - 1),
        positions_T=position % length,
        loss_mask_T=torch.ones(num_tokens, device=device, dtype=torch.bool),
        batch_number=torch.zeros((), device=device, dtype=torch.int64),
    )


def one_step(runner: Runner, step: TrainStep, number: int, *, signature: Signature) -> None:
    """Run batch *number* and move the optimizer, as the training loop does."""
    step.batch.batch_number.fill_(number)
    runner(signature)
    step.set_lr(1e-4)
    runner("update")


def time_steps(run: Callable[[int], object], count: int, device: torch.device) -> list[float]:
    """Return milliseconds of *count* calls: by events on a GPU, by the clock on a CPU."""
    if device.type == "cpu":
        times = []
        for number in range(count):
            started = time.perf_counter()
            run(number)
            times.append((time.perf_counter() - started) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for number in range(count):
        run(number)
        marks[number + 1].record()
    torch.cuda.synchronize(device)
    return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]


def matrix_rate(device: torch.device, *, size: int = 8192, repeats: int = 10) -> float:
    """Return TFLOP/s of a bf16 product of two random square matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times_ms = time_steps(lambda _: torch.mm(left, right), repeats + 3, device)[3:]
    return 2 * size**3 / (statistics.median(times_ms) * 1e-3) / 1e12


def measure(
    name: str, mode: Mode, *, count: int, device: torch.device, profile: Path | None = None
) -> dict[str, Any]:
    """Measure one shape in one mode; *profile* receives the kernels by their share of the time."""
    shape = SHAPES[name]
    step = make_step(shape, device=device)
    runner = Runner(step, mode)
    runner.warm_up()
    runner.enter_worker()
    on_gpu = device.type == "cuda"
    allocs = torch.cuda.memory_stats(device)["num_device_alloc"] if on_gpu else 0
    times_ms = time_steps(lambda n: one_step(runner, step, n, signature="normal"), count, device)
    metric_ms = time_steps(
        lambda n: one_step(runner, step, n, signature="metric"), max(2, count // 5), device
    )
    if profile is not None:
        _profile(lambda n: one_step(runner, step, n, signature="normal"), profile)
    found = averages(step.totals.sums.cpu())
    deciles = statistics.quantiles(times_ms, n=10)
    return {
        "shape": name,
        "mode": mode,
        "steps": count,
        "step_ms_median": statistics.median(times_ms),
        "step_ms_p10": deciles[0],
        "step_ms_p90": deciles[-1],
        "step_ms_max": max(times_ms),
        "metric_step_ms_median": statistics.median(metric_ms),
        "context_tokens_per_s": shape.token_budget / statistics.median(times_ms) * 1e3,
        "warm_up_s": runner.warm_up_s,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        **(_gpu_figures(device, allocs) if on_gpu else {}),
    }


def _profile(run: Callable[[int], object], out: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for number in range(3):
            run(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    out.write_text(seen.key_averages().table(sort_by=order, row_limit=60), encoding="utf-8")


def _gpu_figures(device: torch.device, allocs_before: int) -> dict[str, Any]:
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_allocated_gib": stats["allocated_bytes.all.peak"] / GIB,
        "peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "device_allocs_after_warm_up": stats["num_device_alloc"] - allocs_before,
        "matrix_tflops": matrix_rate(device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=Path, help="file for a table of kernels")
    given = parser.parse_args(arguments)
    result = measure(
        given.shape,
        given.mode,
        count=given.steps,
        device=torch.device(given.device),
        profile=given.profile,
    )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
