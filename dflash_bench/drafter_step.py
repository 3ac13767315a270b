"""One optimizer step of the drafter on given features, in every execution mode asked for.

``python -m dflash_bench.drafter_step --shape qwen3-8b-3072 --mode compiled --mode graphed`` keeps
one process for each mode, which take turns (A B B A); a large matrix product takes turns with them.
A table on stdout, everything as JSON with ``--json``; progress on stderr. Exit code 1 when a mode
died, which is a row too.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from dflash.execution import Mode
from dflash_bench.flop import StepFlop, step_flop
from dflash_bench.machine import machine_facts, say, write_json
from dflash_bench.shapes import SHAPES
from dflash_bench.steps import DrafterStep, Matmul, StepPlan
from dflash_bench.timing import MatrixProduct, matrix_tflops, paired_ratio, step_figures
from dflash_bench.turns import Child, Subject, take_turns

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a shape is measured: at least *steps* steps a mode, spread over *num_turns* turns."""

    shape: str
    device: str
    steps: int = 200
    num_turns: int = 8
    limit_s: float = 300.0
    profile: bool = False
    seed: int = 0
    matmul: Matmul = "bf16"

    def plan(self, mode: Mode) -> StepPlan:
        return StepPlan(
            shape=self.shape,
            mode=mode,
            device=self.device,
            turn_steps=math.ceil(self.steps / self.num_turns),
            profile=self.profile,
            seed=self.seed,
            matmul=self.matmul,
        )


def compare(modes: Sequence[Mode], settings: Settings, *, alone: bool) -> list[Row]:
    """Measure *modes* taking turns, or one after another when *alone*; a row for each."""
    subjects: dict[str, Callable[[], Subject]] = {
        mode: partial(DrafterStep, settings.plan(mode)) for mode in modes
    }
    if not alone:
        return measure(subjects, settings)
    return [row for mode in modes for row in measure({mode: subjects[mode]}, settings)]


def measure(subjects: Mapping[str, Callable[[], Subject]], settings: Settings) -> list[Row]:
    """Let *subjects* and a matrix product take turns; a row for each subject."""
    everything: dict[str, Callable[[], Subject]] = {
        **subjects,
        "matrix product": partial(MatrixProduct, settings.device),
    }
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(name, make, limit_s=settings.limit_s))
            for name, make in everything.items()
        ]
        take_turns(children, num_turns=settings.num_turns, say=say)
    *of_modes, of_product = children
    tflops = None
    if of_product.turns:
        tflops = matrix_tflops(of_product.turns, of_product.facts["matrix_size"])
    flop = step_flop(SHAPES[settings.shape])
    rows = [_row(child, flop, tflops=tflops, settings=settings) for child in of_modes]
    for row, child in zip(rows, of_modes, strict=True):
        if child.turns and of_modes[0].turns:
            row["speed_against_first_mode"] = 1 / paired_ratio(child.turns, of_modes[0].turns)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print a table; 1 when a mode died."""
    given = _parser().parse_args(arguments)
    modes: list[Mode] = list(dict.fromkeys(given.mode or ["eager"]))
    if given.profile is not None and len(modes) > 1:
        _parser().error("--profile takes one --mode")
    settings = Settings(
        shape=given.shape,
        device=given.device,
        steps=given.steps,
        num_turns=given.turns,
        limit_s=given.limit_s,
        profile=given.profile is not None,
        seed=given.seed,
        matmul=given.matmul,
    )
    rows = compare(modes, settings, alone=given.alone)
    if given.profile is not None and "profile_text" in rows[0]:
        given.profile.write_text(rows[0].pop("profile_text"), encoding="utf-8")
    found = report(rows, settings, arguments=sys.argv[1:] if arguments is None else arguments)
    write_json(found, given.json)
    print(table(found))
    return int(any("error" in row for row in rows))


def report(rows: list[Row], settings: Settings, *, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that was found, as the JSON holds it."""
    shape = SHAPES[settings.shape]
    return {
        **machine_facts(torch.device(settings.device), case="drafter_step", arguments=arguments),
        "shape": settings.shape,
        "sizes": asdict(shape),
        "flop": asdict(step_flop(shape)),
        "settings": asdict(settings),
        "modes": rows,
    }


def _row(child: Child, flop: StepFlop, *, tflops: float | None, settings: Settings) -> Row:
    row: Row = {"mode": child.name}
    if child.failure is not None:
        row["error"] = asdict(child.failure)
    times_ms = [time_ms for turn in child.turns for time_ms in turn]
    if child.prepared_s:
        row["first_step_s"] = child.prepared_s
    if len(times_ms) > 1:
        row |= {"steps": len(times_ms), **step_figures(times_ms)}
        seconds = row["step_ms_median"] * 1e-3
        row["context_tokens_per_s"] = SHAPES[settings.shape].token_budget / seconds
        row["model_tflops"] = flop.model / seconds / 1e12
        row["needed_tflops"] = flop.needed / seconds / 1e12
        row["turn_ms_medians"] = [statistics.median(turn) for turn in child.turns]
        if tflops is not None:
            row["matrix_tflops"] = tflops
            row["matrix_share"] = row["model_tflops"] / tflops
            row["matrix_share_needed"] = row["needed_tflops"] / tflops
    return row | child.facts


def table(found: dict[str, Any]) -> str:
    """A line for each mode, below one that says what and where."""
    product = next((row["matrix_tflops"] for row in found["modes"] if "matrix_tflops" in row), None)
    lines = [
        f"{found['shape']} on {found['device']}, torch {found['torch']}, commit {found['commit']}"
        + ("" if product is None else f"; matrix product {product:.0f} TFLOP/s"),
        "mode              ms/step p90/med     max   tok/s  share  GiB  allocs first s      loss",
    ]
    for row in found["modes"]:
        if "error" in row:
            error = row["error"]
            lines.append(
                f"{row['mode']:<16} {error['type']} during {error['during']}: {error['message']}"
            )
        else:
            lines.append(
                f"{row['mode']:<16} {row['step_ms_median']:8.2f} {row['step_p90_over_median']:7.3f}"
                f" {row['step_ms_max']:7.1f} {row['context_tokens_per_s']:7.0f}"
                f" {row.get('matrix_share', math.nan):6.3f} {row['peak_reserved_gib']:5.1f}"
                f" {row['device_allocs_after_warm_up']:6d} {row['first_step_s']:7.1f}"
                f" {row['loss_last']:9.5f}"
            )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--mode", action="append", choices=get_args(Mode), help="repeatable")
    parser.add_argument("--alone", action="store_true", help="modes one after another: less memory")
    parser.add_argument("--steps", type=int, default=200, help="of each mode, at least")
    parser.add_argument("--turns", type=int, default=8, help="over which the steps are spread")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--matmul", choices=get_args(Matmul), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="longer silence is a hang")
    parser.add_argument("--json", type=Path, help="file for everything that was found")
    parser.add_argument("--profile", type=Path, help="file for kernels by their share; one mode")
    return parser


if __name__ == "__main__":
    sys.exit(main())
