"""The options of ``dflash bench`` and ``dflash bench scaling``, and the plan they make."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash.errors import UsageError

if TYPE_CHECKING:
    from dflash_bench.assignments import Assignments
    from dflash_bench.cases._case import Lengths
    from dflash_bench.session import BenchPlan
    from dflash_bench.shapes import BenchShape

LONGEST_S = 1e7
"""A third of a year: infinity is no limit, and no number of JSON."""

Cases = Annotated[
    list[str] | None, typer.Argument(metavar="CASE", help="what to measure; --list shows all")
]
Modes = Annotated[
    list[str] | None, typer.Option("--mode", metavar="M", help="repeatable; all that apply")
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="NAME", help="repeatable; --list")
]
Configs = Annotated[
    list[Path] | None, typer.Option("--config", metavar="FILE", help="your own training as a shape")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="of shapes that have the key; repeatable"),
]
LengthsOf = Annotated[
    list[str] | None,
    typer.Option("--lengths", metavar="fixed|variable", help="of batches; repeatable"),
]
Drafters = Annotated[int, typer.Option(min=1, max=64, help="threads with a drafter each")]
Devices = Annotated[
    list[str] | None, typer.Option("--device", metavar="D", help="cpu or cuda:N; repeatable")
]
TargetDevice = Annotated[str, typer.Option("--target-device", help="auto, cpu or cuda:N")]
Matmul = Annotated[Literal["bf16", "fp8", "fp8-head"], typer.Option(help="as precision.matmul")]
DrafterPath = Annotated[
    str, typer.Option("--drafter", metavar="CHECKPOINT", help="run or checkpoint, to decode with")
]
Data = Annotated[
    list[str] | None, typer.Option("--data", metavar="FILE", help="texts or prompts; repeatable")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of weights and batches")]
Steps = Annotated[int, typer.Option(min=1, max=10_000, help="timed steps in a turn")]
Pairs = Annotated[int, typer.Option(min=1, max=10_000, help="turns of every mode, at least")]
Precision = Annotated[str, typer.Option(metavar="P%", help="smallest difference that counts")]
MaxTime = Annotated[
    float,
    typer.Option(min=0.1, max=LONGEST_S, metavar="S", help="seconds of turns for a case and shape"),
]
Timeout = Annotated[
    float, typer.Option(min=0.1, max=LONGEST_S, metavar="S", help="longer silence is a hang")
]
Profile = Annotated[
    bool, typer.Option("--profile", help="also find which kernels the time goes to")
]
Expect = Annotated[
    list[str] | None,
    typer.Option("--expect", metavar="'EXPR'", help="'graphed/eager >= 3'; repeatable"),
]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="write it for a pull request")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="write one HTML page")]
RequireGpu = Annotated[bool, typer.Option("--require-gpu", help="exit 3 where there is none")]


def share(text: str, option: str) -> float:
    """Read "1%" or "0.01".

    Raises:
        UsageError: it is no number above 0 and below 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        what = f"{option} {text} is no share above 0 and below 1"
        raise UsageError(what, hint=f"such as {option} 1%, or {option} 0.01")
    return value


def bench_plan(given: Mapping[str, Any]) -> "BenchPlan":
    """The plan that a command's parameters make; *given* is by their names.

    Raises:
        UsageError: no such case, mode or shape, or a precision that is none.
        ConfigError: a configuration is wrong.
    """
    from dflash_bench.selection import named_cases, named_modes

    cases = named_cases(given["cases"] or [])
    modes = named_modes(given["modes"] or [], cases)
    lengths = _lengths(given["lengths"] or ["fixed"])
    precision = share(given["precision"], "--precision")
    _read_shapes(given)
    from dflash_bench.session import BenchPlan  # with torch, so no sooner

    return BenchPlan(
        cases=cases,
        modes=modes,
        shapes=_shapes(given),
        lengths=lengths,
        drafters=given["drafters"],
        devices=tuple(given["devices"] or ["auto"]),
        target_device=given["target_device"],
        drafter=given["drafter"],
        data=tuple(given["data"] or []),
        matmul=given["matmul"],
        seed=given["seed"],
        profile=given["profile"],
        turn_steps=given["steps"],
        min_pairs=given["pairs"],
        precision=precision,
        max_time_s=given["max_time"],
        limit_s=given["timeout"],
        require_gpu=given["require_gpu"],
        command=_command(given["context"].obj),
    )


def _command(words: list[str]) -> str:
    """What to type to do it again; the first word is a command's name, of two words perhaps."""
    return f"dflash {words[0]} {shlex.join(words[1:])}".strip()


def _lengths(words: list[str]) -> "tuple[Lengths, ...]":
    known: tuple[Lengths, ...] = ("fixed", "variable")
    for word in words:
        if word not in known:
            raise UsageError(f"--lengths {word} is neither fixed nor variable")
    return tuple(each for each in known if each in words)


def _read_shapes(given: Mapping[str, Any]) -> None:
    """Meet the mistakes in what shapes are read from, without torch."""
    from dflash.config import load
    from dflash_bench.shape_files import read_shape

    assigned = _assigned(given)
    for name in given["shapes"] or []:
        read_shape(name, assigned.of_shapes)
    for path in given["configs"] or []:
        load(path, assigned.of_configs)


def _assigned(given: Mapping[str, Any]) -> "Assignments":
    from dflash_bench.assignments import shared_out

    configs = bool(given["configs"])
    shapes = bool(given["shapes"]) or not configs
    return shared_out(given["sets"] or [], shapes=shapes, configs=configs)


def _shapes(given: Mapping[str, Any]) -> "tuple[BenchShape, ...]":
    from dflash_bench.shapes import named_shape, shape_of_config

    assigned = _assigned(given)
    names = list(dict.fromkeys(given["shapes"] or []))
    configs = list(dict.fromkeys(given["configs"] or []))
    if not names and not configs:
        names = [default_shape(given["devices"] or [])]
    shapes = (
        *(named_shape(name, assigned.of_shapes) for name in names),
        *(shape_of_config(path, assigned.of_configs) for path in configs),
    )
    called = [shape.name for shape in shapes]
    for name in called:
        if called.count(name) > 1:
            raise UsageError(
                f"two shapes are called {name}, so their rows could not be told apart",
                hint="a configuration's shape is called as its file: name one of them otherwise",
            )
    return shapes


def default_shape(devices: list[str]) -> str:
    """What is measured where nothing is said: something that the machine can do."""
    import torch

    on_gpu = torch.cuda.device_count() > 0 and devices != ["cpu"]
    return "qwen3-8b-3072" if on_gpu else "tiny"
