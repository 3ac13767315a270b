"""A bench made up by hand, of no machine: every kind of row, two lengths, a curve, bad weather."""

import random
from pathlib import Path
from typing import Any

import pytest

from dflash.environment import Environment
from dflash.measurement import (
    Bench,
    Comparison,
    Estimate,
    Failed,
    Graphs,
    Memory,
    Row,
    Scaling,
    Spoiled,
    Spread,
    StartUp,
    Weather,
)
from dflash.nvml import Gpu
from dflash_bench.files import bench_json

SHAPE = "made-up-3072"
SWEPT = (8192, 16384, 24576, 49152)
MESSAGE = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
    ' Stack trace: [<could not find stack trace> & "more"]. To prevent overwriting, clone the'
    " tensor outside of torch.compile() or call torch.compiler.cudagraph_mark_step_begin()"
    " before each model invocation."
)
STEP_MS = {"eager": 186.0, "compiled": 140.0, "warmed": 134.0, "graphed": 120.0}


def estimate(value: float, half: float = 0.002) -> Estimate:
    return Estimate(value=value, low=value * (1 - half), high=value * (1 + half))


def turns(median_ms: float, *, seed: int, num_turns: int = 8, steps: int = 25) -> list[list[float]]:
    noise = random.Random(seed)
    drift, made = 0.0, []
    for _ in range(num_turns):
        drift += noise.gauss(0, 0.003)
        made.append([median_ms * (1 + drift + abs(noise.gauss(0, 0.006))) for _ in range(steps)])
    made[num_turns // 2][3] = median_ms * 1.31  # somebody else was there for a moment
    return made


def measured(mode: str, lengths: Any = "fixed", **changes: Any) -> Row:  # noqa: ANN401
    """A row that was measured; *changes* are its other fields."""
    step_ms = STEP_MS[mode] * (1.04 if lengths == "variable" else 1.0)
    times = turns(step_ms, seed=len(mode))
    churn = 0.25 if lengths == "variable" and mode == "eager" else 0.0
    steps = list(range(0, 200, 10))
    facts: dict[str, Any] = {
        "case": "drafter-step",
        "shape": SHAPE,
        "mode": mode,
        "lengths": lengths,
        "padded": lengths == "variable" and mode in ("warmed", "graphed"),
        "state": "measured",
        "per_s": estimate(3072 / step_ms * 1000),
        "step_ms": Spread(
            median=step_ms,
            p10=step_ms * 0.99,
            p90=step_ms * 1.012,
            max=max(map(max, times)),
            count=200,
        ),
        "turns_ms": times,
        "start_up": StartUp(
            first_step_s=31.6,
            build_s=9.25,
            warm_up_s=20.1,
            compile_s=None if mode == "eager" else 15.2,
            capture_s=1.5 if mode in ("warmed", "graphed") else None,
            first_steps_ms=[18_400.0, step_ms * 1.2, step_ms * 1.02],
            pays_back_after_steps=None if mode == "eager" else 1234.0,
        ),
        "memory": Memory(
            peak_allocated_gib=23.5,
            peak_reserved_gib=25.1 + churn * 20,
            graph_pools_gib=4.4 if mode in ("warmed", "graphed") else None,
            process_gib=27.2 + churn * 20,
            rss_gib=3.9,
            device_allocs=38 if churn else 0,
            alloc_retries=0,
            planned_gib=26.0,
            steps=steps,
            allocated_gib=[23.5 for _ in steps],
            reserved_gib=[25.1 + churn * at for at, _ in enumerate(steps)],
        ),
        "graphs": Graphs(
            compiled=0 if mode == "eager" else 9,
            cached=0 if mode == "eager" else 7,
            recompiles=0,
            captured=4,
            captured_late=0,
            skipped=0,
        ),
        "model_tflops": 550.0,
        "matrix_share": 0.78,
        "loss": 11.9312,
        "loss_against_eager": 0.0 if mode == "eager" else 2.5e-5,
        "more": {"kernels": 812, "by_kind_ms": {"matmul": 90.0}},
    }
    return Row(**(facts | changes))


def failed(lengths: Any = "fixed") -> Row:  # noqa: ANN401 - one of two words
    return Row(
        case="drafter-step",
        shape=SHAPE,
        mode="reduce-overhead",
        lengths=lengths,
        state="failed",
        failed=Failed(
            type="RuntimeError",
            message=MESSAGE,
            during="turn",
            slug="cudagraph-trees",
            traceback='Traceback (most recent call last):\n  File "<step>", line 1, in step\n',
        ),
        start_up=StartUp(first_step_s=44.0, build_s=9.0, warm_up_s=33.0),
    )


def skipped(lengths: Any = "fixed") -> Row:  # noqa: ANN401 - one of two words
    why = "the memory plan says 151.0 GiB, the GPU has 139.8"
    facts = {"case": "drafter-step", "shape": SHAPE, "lengths": lengths, "mode": "compiled"}
    return Row(**facts, state="skipped", why=why)


def compared(row: Row, baseline: Row, verdict: Any = "faster") -> Comparison:  # noqa: ANN401
    assert row.step_ms is not None
    assert baseline.step_ms is not None
    ratio = estimate(row.step_ms.median / baseline.step_ms.median, 0.0012)
    return Comparison(
        row=row.name, baseline=baseline.name, ratio=ratio, pairs=8, precision=0.01, verdict=verdict
    )


def curve() -> tuple[Scaling, list[Row]]:
    """Four values, the last of which fits nowhere."""
    budgets = [*SWEPT]
    rows = [measured("graphed", shape=f"made-up-{budget}") for budget in budgets[:3]]
    rows.append(skipped().model_copy(update={"shape": "made-up-49152", "mode": "graphed"}))
    scaling = Scaling(
        over="token_budget",
        values=budgets,
        rows=[row.name for row in rows],
        step_ms=[301.0, 655.5, 1051.2, None],
        exponent=Estimate(value=1.14, low=1.11, high=1.17),
        peak_gib=[39.4, 62.0, 85.1, None],
        planned_gib=[40.0, 63.5, 87.2, 151.0],
        wall=49152,
    )
    return scaling, rows


ENVIRONMENT = Environment(
    dflash="0.1.0",
    python="3.12.3",
    platform="Linux",
    cpu_cores=16,
    memory_gib=128.0,
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0", "rich": None},
    driver="580.1",
    gpus=[
        Gpu(index=0, name="Made-up GPU", memory_gib=139.8, used_gib=0.5, compute_capability="9.0")
    ],
)


def sample() -> Bench:
    """Everything that a bench can hold."""
    rows, comparisons = [], []
    for lengths in ("fixed", "variable"):
        some = [measured(mode, lengths) for mode in ("eager", "warmed", "graphed")]
        some[1] = some[1].model_copy(update={"why": "another process used the GPU in two turns"})
        comparisons += [compared(row, some[0]) for row in some[1:]]
        rows += [some[0], skipped(lengths), failed(lengths), *some[1:]]
    comparisons.append(compared(rows[5], rows[0], verdict="slower"))
    scaling, more_rows = curve()
    return Bench(
        command=(
            f"dflash bench drafter-step --shape {SHAPE} --lengths fixed --lengths variable"
            " --precision 1% --expect 'graphed/eager >= 1.5'"
        ),
        date="2026-01-02T03:04:05+00:00",
        commit="0123456",
        wall_s=511.0,
        environment=ENVIRONMENT,
        device="Made-up GPU",
        shapes={
            SHAPE: {"token_budget": 3072, "num_anchors": 512, "num_documents": 1},
            **{f"made-up-{budget}": {"token_budget": budget} for budget in SWEPT},
        },
        options={"precision": 0.01, "turn_steps": 25},
        matrix_tflops=705.0,
        overhead_share=Estimate(value=0.0031, low=-0.0012, high=0.0074),
        rows=[*rows, *more_rows],
        comparisons=comparisons,
        scaling=[scaling],
        weather=Weather(
            samples=900,
            sm_mhz_median=1755,
            sm_mhz_low=1410,
            sm_mhz_high=1980,
            power_w_median=688.4,
            temperature_c_max=71,
            power_limited_share=0.37,
            spoiled=[
                Spoiled(
                    what="throttled", text="hardware slowdown, in 12% of the samples", share=0.12
                )
            ],
        ),
    )


GOOD = [row for row in sample().rows if row.state == "measured" and row.shape == "made-up-3072"]


def good(**changes: Any) -> Bench:  # noqa: ANN401
    return sample().model_copy(update={"rows": GOOD, "scaling": []} | changes)


def write(path: Path, bench: Bench) -> str:
    path.write_text(bench_json(bench), encoding="utf-8")
    return str(path)


def error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    return said.err
