"""``dflash bench``: measure execution modes against each other."""

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli import bench_options as option
from dflash.cli.bench_reports import BenchReports, exit_code
from dflash.cli.interrupts import sigterm_is_ctrl_c
from dflash.cli.options import JsonOut
from dflash.cli.output import give_json, json_file, print_lines, print_table, talk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_bench.expressions import Expectation


def bench(  # noqa: PLR0913 - a command's options
    context: typer.Context,
    cases: option.Cases = None,
    *,
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
    max_time: option.MaxTime = 120.0,
    timeout: option.Timeout = 300.0,
    profile: option.Profile = False,
    expect: option.Expect = None,
    json_out: JsonOut = None,
    markdown: option.Markdown = None,
    html: option.Html = None,
    require_gpu: option.RequireGpu = False,
    list_only: Annotated[bool, typer.Option("--list", help="list cases, modes and shapes")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema")] = False,
) -> None:
    """Measure execution modes, which take turns in processes of their own.

    dflash bench compare and dflash bench scaling have options of their own.
    """
    given = locals()
    if schema:
        _schema(json_out)
        return
    if list_only:
        _list(json_out)
        return
    reports = BenchReports(json_out, markdown, html)
    reports.check(*(configs or []), *map(Path, data or []))
    wanted = _expectations(expect or [], cases or [], modes or [])
    with sigterm_is_ctrl_c():
        plan = option.bench_plan(given)
        from dflash_bench.expectations import judge
        from dflash_bench.session import run_bench

        found = run_bench(plan, say=talk)
    outcomes = [outcome for each in wanted for outcome in judge(each, found)]
    reports.give(found, outcomes)
    sys.exit(exit_code(found, outcomes))


def _expectations(
    texts: "Sequence[str]", cases: "Sequence[str]", modes: "Sequence[str]"
) -> "list[Expectation]":
    """Read all of them, so that a mistake is met before anything is measured."""
    from dflash_bench.expressions import parse_expectation
    from dflash_bench.selection import modes_of, named_cases, named_modes

    chosen = named_cases(cases)
    every = modes_of(chosen)
    wanted = named_modes(modes, chosen) or every
    groups = [[mode for mode in modes_of([case]) if mode in wanted] for case in chosen]
    return [parse_expectation(text, groups, others=every) for text in texts]


def _schema(json_out: str | None) -> None:
    from dflash.measurement import Changes
    from dflash_bench.files import file_schema

    give_json({"Bench": file_schema(), "Changes": Changes.model_json_schema()}, json_file(json_out))


def _list(json_out: str | None) -> None:
    from dflash_bench.cases import all_cases
    from dflash_bench.shape_files import shape_names
    from dflash_bench.shapes import named_shape

    cases = all_cases().values()
    shapes = {name: named_shape(name) for name in shape_names()}
    if json_out is not None:
        names = ("name", "help", "modes", "unit")
        facts = [{name: getattr(case, name) for name in names} for case in cases]
        sizes = {name: shape.record() for name, shape in shapes.items()}
        give_json({"cases": facts, "shapes": sizes}, json_file(json_out))
    if json_out == "-":
        return
    lines = [line for case in cases for line in _told(case.name, case.help, modes=case.modes)]
    print_lines(["cases, and their modes with the baseline first", *lines, ""], lambda _: "")
    rows = [
        (name, f"{shape.token_budget}", f"{shape.num_anchors}", f"{shape.num_documents}")
        for name, shape in shapes.items()
    ]
    print_table(("shape", "tokens", "anchors", "documents"), rows)


def _told(name: str, about: str, *, modes: "Sequence[str]") -> list[str]:
    indent = " " * 16
    wrap = textwrap.TextWrapper(78, subsequent_indent=indent, break_on_hyphens=False)
    return [*wrap.wrap(f"{name:<15} {about}"), *wrap.wrap(f"{indent}modes: {', '.join(modes)}")]
