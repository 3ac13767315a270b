"""``dflash diagnose``: list failure modes, reproduce them here, read what a finished run shows."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dflash.cli.diagnose_options import refuse_others, task_of
from dflash.cli.interrupts import sigterm_is_ctrl_c
from dflash.cli.options import JsonOut
from dflash.cli.output import (
    give_json,
    json_file,
    print_json,
    print_json_text,
    print_lines,
    print_table,
    raise_all,
    talk,
    write_all,
)
from dflash.cli.reports import Reports
from dflash.errors import MissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.diagnose.examine import Plan
    from dflash.diagnose.findings import Diagnosis, Launch
    from dflash.diagnose.machine import Machine
    from dflash.failures import FailureMode

FOUND_EXIT = 1
INCONCLUSIVE_EXIT = 4
Level = Annotated[
    Literal["quick", "standard", "deep"],
    typer.Option(help="5, 20 or 300 launches, of GPU modes 2, 5 or 20"),
]
StepName = Annotated[
    str, typer.Option(metavar="MODULE:FUNCTION", help="your own step: make_step(device)")
]
FailOn = Annotated[
    Literal["error", "warning", "never"], typer.Option(help="what makes the exit code 1")
]


def diagnose(  # noqa: PLR0913 - a command's options
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SLUG]...|all|run RUN_DIR", help="nothing lists the failure modes"),
    ] = None,
    *,
    level: Level = "standard",
    trials: Annotated[
        int | None, typer.Option(min=1, help="launches instead of the level's")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="seconds of a launch instead of the page's")
    ] = None,
    targets: Annotated[
        int, typer.Option("-M", "--targets", min=1, help="for the advice of all")
    ] = 1,
    drafters: Annotated[
        int, typer.Option("-N", "--drafters", min=1, help="for the advice of all")
    ] = 1,
    step: StepName = "",
    json_out: JsonOut = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="write JUnit XML")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write one HTML page")] = None,
    require_gpu: Annotated[bool, typer.Option(help="exit 3 where there is none")] = False,
    fail_on: FailOn = "error",
    list_only: Annotated[bool, typer.Option("--list", help="list, launch nothing")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema")] = False,
) -> None:
    """Reproduce failure modes of training on this machine, each in processes of its own.

    dflash diagnose watch -- COMMAND runs a program of yours and diagnoses that.
    """
    words, reports = words or [], Reports(json_out, junit, html)
    task = task_of(words, listed=list_only, schema=schema)
    refuse_others(context, task)
    if task == "run":
        _read_run(Path(words[1]), reports, fail_on=fail_on)
        return
    reports.check()
    if task == "schema":
        _print_schema()
        return
    from dflash.diagnose.examine import Plan
    from dflash.diagnose.select import modes_called

    plan = Plan(level=level, trials=trials, time_limit_s=timeout, step=step)
    machine = _machine(require_gpu=require_gpu)
    modes = modes_called(words)
    if task == "list":
        _list(modes, machine, plan=plan, json_out=json_out)
        return
    from dflash.diagnose.session import diagnose as examine_all

    with sigterm_is_ctrl_c():
        counts = (targets, drafters) if task == "all" else None
        found = examine_all(modes, machine, plan=plan, counts=counts, watch=_talk_of)
    reports.give(found)
    _leave(found, fail_on=fail_on)


def _machine(*, require_gpu: bool) -> "Machine":
    from dflash.diagnose.machine import look

    machine = look()
    if require_gpu and not machine.num_gpus:
        raise MissingError(
            "--require-gpu: there is no CUDA GPU that torch could use",
            hint="dflash env says why; without --require-gpu what runs on a CPU is run",
        )
    return machine


def _talk_of(slug: str, launch: "Launch") -> None:
    from dflash.report.diagnosis import launch_line

    talk(launch_line(slug, launch))


def _read_run(run_dir: Path, reports: Reports, *, fail_on: str) -> None:
    from dflash.diagnose.aftermath import diagnose_run
    from dflash.diagnose.machine import installed_torch
    from dflash.diagnose.run_folder import files_of
    from dflash.report.diagnosis import run_lines, style_of

    reports.check(*files_of(run_dir))
    installed_torch()
    found = diagnose_run(run_dir)
    text = found.model_dump_json(indent=2) + "\n"
    failed = write_all([(json_file(reports.json_out), lambda: text)])
    if reports.json_out == "-":
        print_json_text(text)
    else:
        print_lines(run_lines(found), style_of)
    raise_all(failed)
    if found.suffered and fail_on != "never":
        sys.exit(FOUND_EXIT)


def _leave(found: "Diagnosis", *, fail_on: str) -> None:
    """End with the code that the findings and *fail_on* ask for, or as one that was interrupted."""
    if not found.complete:
        raise KeyboardInterrupt
    if fail_on == "never":
        return
    counts = ("error",) if fail_on == "error" else ("error", "warning")
    if any(finding.severity in counts for finding in found.findings):
        sys.exit(FOUND_EXIT)
    if any(finding.verdict == "inconclusive" for finding in found.findings):
        sys.exit(INCONCLUSIVE_EXIT)


def _list(
    modes: "Sequence[FailureMode]", machine: "Machine", *, plan: "Plan", json_out: str | None
) -> None:
    from dflash.diagnose.expected import expectation
    from dflash.diagnose.machine import applies
    from dflash.failures import page_of

    rows = []
    for mode in modes:
        fit, expected = (
            applies(mode, machine),
            expectation(mode, machine.torch, num_gpus=machine.num_gpus),
        )
        runs = fit.not_run if fit.part is None else ("in part" if fit.part == "cpu" else "yes")
        num = plan.launches(mode, fit.part) if fit.part else 0
        rows.append((mode.slug, page_of(mode).title, runs, expected.expected, num))
    names = ("slug", "title", "applies", "expected", "launches")
    facts = [dict(zip(names, row, strict=True)) for row in rows]
    if json_out is not None:
        give_json(facts, json_file(json_out))
    if json_out == "-":
        return
    shown = [(slug, runs, expected, str(num)) for slug, _, runs, expected, num in rows]
    print_table(("failure mode", "runs here", "expected", "launches"), shown)
    talk(f"expected: what is known of torch {machine.torch}; dflash explain SLUG says more")


def _print_schema() -> None:
    from dflash.diagnose.findings import Diagnosis, RunDiagnosis, WatchDiagnosis

    models = (Diagnosis, RunDiagnosis, WatchDiagnosis)
    print_json({model.__name__: model.model_json_schema() for model in models})
