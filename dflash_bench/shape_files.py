"""``configs/bench/*.toml``: the numbers of named shapes, and overrides of them; without torch."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.drafter.shape import DrafterShape
from dflash.errors import ConfigError, UsageError
from dflash_bench.shape_rules import SIZES, problems_of

FOLDER = "configs/bench"
DISTRIBUTION = "dflash-trainer"
LARGEST = 2**63 - 1
"""Whole number of TOML."""


class ShapeFile(BaseModel):
    """What such a file holds; whether a batch can have such sizes, ``shape_rules`` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_budget: int
    num_documents: int
    anchor_density: float = Field(gt=0, le=1)
    num_anchors: int | None = None
    drafter: DrafterShape


SHAPE_KEYS = (
    *(name for name in ShapeFile.model_fields if name != "drafter"),
    *(f"drafter.{one.name}" for one in fields(DrafterShape)),
)
"""What ``--set`` can change of it."""


def key_of(item: str) -> str:
    """The key of ``key=value``.

    Raises:
        UsageError: it is none.
    """
    key, sign, _ = item.partition("=")
    if not sign or not key.strip():
        raise UsageError(f"--set {item} is no override", hint="write key=value: token_budget=8192")
    return key.strip()


def shape_names() -> list[str]:
    """Every named shape, small ones first."""
    sizes = {path.stem: _read(path) for path in _files()}
    return sorted(sizes, key=lambda name: _weight(sizes[name]))


def read_shape(name: str, overrides: Sequence[str] = ()) -> ShapeFile:
    """Read a file of ``configs/bench``; *overrides* are ``token_budget=8192``.

    Raises:
        UsageError: there is none of that name; suggests the nearest.
        ConfigError: an override breaks a rule.
    """
    path = next((path for path in _files() if path.stem == name), None)
    if path is None:
        names = shape_names()
        near = difflib.get_close_matches(name, names, n=1)
        raise UsageError(
            f"there is no shape {name!r}",
            hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}",
        )
    tree = _read(path)
    for item in overrides:
        _override(tree, item)
    try:
        read = ShapeFile.model_validate(tree)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}"
            for one in error.errors()
        ]
        raise ConfigError(f"shape {name}: {'; '.join(problems)}") from error
    sizes = {size: given for size in SIZES if (given := getattr(read, size)) is not None}
    parts = {"drafter": asdict(read.drafter)}
    if broken := problems_of(sizes, block_size=read.drafter.block_size, parts=parts):
        raise ConfigError(f"shape {':'.join([name, *overrides])}: {'; '.join(broken)}")
    return read


@cache
def _files() -> tuple[Path, ...]:
    """Of the working tree; of an installed wheel, wherever it keeps data."""
    beside = Path(__file__).parent.parent / FOLDER
    if beside.is_dir():
        return tuple(sorted(beside.glob("*.toml")))
    try:
        installed = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        installed = []
    return tuple(
        Path(str(file.locate()))
        for file in sorted(installed)
        if file.suffix == ".toml" and file.parent.parts[-2:] == ("dflash", "bench")
    )


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _weight(tree: Mapping[str, Any]) -> int:
    drafter = tree["drafter"]
    return int(tree["token_budget"] * drafter["hidden_size"] * drafter["vocab_size"])


def _override(tree: dict[str, Any], item: str) -> None:
    """Put one ``key=value`` into *tree*."""
    key, raw = key_of(item), item.partition("=")[2].strip()
    if key not in SHAPE_KEYS:
        near = difflib.get_close_matches(key, SHAPE_KEYS, n=1, cutoff=0.5)
        raise UsageError(
            f"--set {item}: a shape has no {key}",
            hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(SHAPE_KEYS)}",
        )
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--set {item}: {raw!r} is no number or list of numbers") from error
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UsageError(f"--set {item}: a whole number has 64 bits at most")
    table, _, name = key.rpartition(".")
    (tree[table] if table else tree)[name] = value
