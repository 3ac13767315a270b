"""``dflash bench scaling``: one size of a shape swept, and the curve of its cost."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash.cli import bench_options as option
from dflash.cli.bench_reports import BenchReports, exit_code
from dflash.cli.interrupts import sigterm_is_ctrl_c
from dflash.cli.options import JsonOut
from dflash.cli.output import talk
from dflash.errors import UsageError

MIN_VALUES = 2


def scaling(  # noqa: PLR0913 - a command's options
    context: typer.Context,
    cases: option.Cases = None,
    *,
    over: Annotated[
        Literal["token_budget", "num_anchors", "num_documents", "drafters"],
        typer.Option(help="what is swept"),
    ] = "token_budget",
    values: Annotated[
        str, typer.Option(metavar="N,N,..", help="its values, such as 8192,16384,32768")
    ],
    modes: option.Modes = None,
    shapes: option.Shapes = None,
    configs: option.Configs = None,
    sets: option.Sets = None,
    lengths: option.LengthsOf = None,
    drafters: option.Drafters = 1,
    devices: option.Devices = None,
    target_device: option.TargetDevice = "auto",
    matmul: option.Matmul = "bf16",
    drafter: option.DrafterPath = "",
    data: option.Data = None,
    seed: option.Seed = 0,
    steps: option.Steps = 10,
    pairs: option.Pairs = 6,
    precision: option.Precision = "1%",
    max_time: option.MaxTime = 60.0,
    timeout: option.Timeout = 300.0,
    json_out: JsonOut = None,
    markdown: option.Markdown = None,
    html: option.Html = None,
    require_gpu: option.RequireGpu = False,
) -> None:
    """Measure at several values of one size: cost, its exponent, memory, and the plan's wall."""
    given = locals() | {"profile": False}
    reports = BenchReports(json_out, markdown, html)
    swept = _numbers(values)
    _refuse_what_is_swept(over, drafters=drafters, sets=sets or [])
    reports.check(*(configs or []), *map(Path, data or []))
    with sigterm_is_ctrl_c():
        plan = option.bench_plan(given)
        from dflash_bench.scaling import run_scaling

        found = run_scaling(plan, over, swept, say=talk)
    reports.give(found)
    sys.exit(exit_code(found))


def _refuse_what_is_swept(over: str, *, drafters: int, sets: list[str]) -> None:
    from dflash_bench.shape_files import key_of

    given = [f"--set {item}" for item in sets if key_of(item).rpartition(".")[2] == over]
    if over == "drafters" and drafters != 1:
        given = [f"--drafters {drafters}"]
    if given:
        raise UsageError(
            f"{given[0]} says what --over {over} sweeps",
            hint="its values are those of --values; leave the other out",
        )


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    numbers = sorted({int(word) for word in words if word.isdecimal()} - {0})
    if len(numbers) < len(words) or len(numbers) < MIN_VALUES:
        raise UsageError(
            f"--values {text} are not two or more different whole numbers above 0",
            hint="such as --values 8192,16384,32768",
        )
    return numbers
