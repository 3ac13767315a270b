"""A bench as pytest-benchmark keeps its runs, so that its ``compare`` loads it. Seconds."""

import platform
import statistics
from typing import Any

from dflash.measurement import Bench, Row

LAYOUT = "5.0.0"
"""The version of pytest-benchmark whose layout this is."""


def pytest_benchmark_parts(bench: Bench) -> dict[str, Any]:
    """What pytest-benchmark has at the top of its files."""
    commit = bench.commit or ""
    return {
        "machine_info": {
            "node": "",
            "processor": bench.device,
            "machine": platform.machine(),
            "python_version": bench.environment.python,
            "system": bench.environment.platform,
            "cpu": {"brand_raw": bench.device, "count": bench.environment.cpu_cores},
        },
        "commit_info": {
            "id": commit.rstrip("+"),
            "dirty": commit.endswith("+"),
            "project": "dflash",
        },
        "benchmarks": [_benchmark(row) for row in bench.rows if any(row.turns_ms)],
        "datetime": bench.date,
        "version": LAYOUT,
    }


def _benchmark(row: Row) -> dict[str, Any]:
    params = {"mode": row.mode, "shape": row.shape, "lengths": row.lengths}
    name = f"{row.case}[{row.shape}-{row.lengths}-{row.mode}]"
    times_s = [time_ms * 1e-3 for turn in row.turns_ms for time_ms in turn]
    kept = {"step_ms", "per_s", "unit", "memory", "graphs", "start_up", "loss", "more"}
    return {
        "group": f"{row.case} {row.shape} {row.lengths}",
        "name": name,
        "fullname": f"dflash bench {name}",
        "params": params,
        "param": row.mode,
        "extra_info": row.model_dump(mode="json", include=kept),
        "options": {"disable_gc": False, "warmup": True},
        "stats": _stats(times_s),
    }


def _stats(times_s: list[float]) -> dict[str, Any]:
    """What pytest-benchmark computes of its rounds, quartiles by the standard library's rule."""
    ordered, mean = sorted(times_s), statistics.fmean(times_s)
    deviation = statistics.stdev(times_s) if len(times_s) > 1 else 0.0
    low, high = (
        statistics.quantiles(ordered, n=4)[::2] if len(ordered) > 1 else (ordered[0], ordered[0])
    )
    fences = low - 1.5 * (high - low), high + 1.5 * (high - low)
    far = sum(not fences[0] <= time_s <= fences[1] for time_s in ordered)
    unusual = sum(abs(time_s - mean) > deviation for time_s in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": len(ordered),
        "median": statistics.median(ordered),
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": far,
        "stddev_outliers": unusual,
        "outliers": f"{unusual};{far}",
        "ld15iqr": next((t for t in ordered if t >= fences[0]), ordered[0]),
        "hd15iqr": next((t for t in reversed(ordered) if t <= fences[1]), ordered[-1]),
        "ops": 1 / mean,
        "total": sum(ordered),
        "iterations": 1,
    }
