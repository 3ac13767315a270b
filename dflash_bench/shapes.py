"""The shapes that cases run at: ``configs/bench/*.toml``, overrides, and a user's own config."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.drafter.masks import num_anchors_for
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.shape import DrafterShape
from dflash.errors import ConfigError, UsageError

FOLDER = "configs/bench"
DISTRIBUTION = "dflash-trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """A drafter and its packed batches: documents of equal length, all supervised.

    Attributes:
        name: of a file in ``configs/bench``, with its overrides; or a config's own file name.
        token_budget: T.
        num_anchors: N, also where a batch is shorter than T.
    """

    name: str
    drafter: DrafterShape
    token_budget: int
    num_anchors: int
    num_documents: int
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    activation_checkpointing: bool = False

    def record(self) -> dict[str, Any]:
        """Every number of it, as JSON reads it back."""
        numbers = asdict(self)
        numbers["drafter"]["target_layer_ids"] = list(self.drafter.target_layer_ids)
        return numbers

    def with_(self, **changes: Any) -> "BenchShape":  # noqa: ANN401 - any of the fields
        """The same with other numbers; give it a name of its own."""
        return replace(self, **changes)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    token_budget: int = Field(ge=128, multiple_of=128)
    num_documents: int = Field(ge=1)
    anchor_density: float = Field(gt=0, le=1)
    num_anchors: int | None = Field(default=None, ge=1)
    drafter: DrafterShape


def shape_names() -> list[str]:
    """Every named shape, small ones first."""
    sizes = {path.stem: _read(path) for path in _files()}
    return sorted(sizes, key=lambda name: _weight(sizes[name]))


def named_shape(name: str, overrides: Sequence[str] = ()) -> BenchShape:
    """Read a shape of ``configs/bench``; *overrides* are ``token_budget=8192``.

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
    return _shape(tree, name=":".join([name, *overrides]), source=f"shape {name}")


def shape_of_config(path: Path, overrides: Sequence[str] = ()) -> BenchShape:
    """Take the shape of a training configuration; of the target only its config.json is read.

    Documents have the longest length that the configuration allows.

    Raises:
        ConfigError: the configuration breaks a rule, or so does the shape that it gives.
        MissingError: the target's config is not there.
    """
    from dflash.config import load, resolved_gamma
    from dflash.target.shape import shape_for
    from dflash.target.sizes import read_sizes

    config = load(path, overrides).config
    target = read_sizes(config.target)
    budget, block_size = config.data.token_budget, config.drafter.block_size
    return BenchShape(
        name=":".join([path.stem, *overrides]),
        drafter=shape_for(
            target.config,
            config.drafter,
            taps=target.taps,
            vocab_size=target.vocab_size,
            mask_token_id=config.drafter.mask_token_id or 0,  # any: random tokens mean nothing
        ),
        token_budget=budget,
        num_anchors=num_anchors_for(budget, config.data.anchor_density, block_size),
        num_documents=max(1, -(-budget // config.data.max_document_tokens)),
        objective=ObjectiveSettings(
            kind=config.objective.kind,
            gamma=resolved_gamma(config),
            dpace_alpha=config.objective.dpace_alpha,
        ),
        activation_checkpointing=config.execution.activation_checkpointing,
    )


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
    key, sign, raw = (part.strip() for part in item.partition("="))
    if not sign:
        raise UsageError(f"--set {item} is no override", hint="write key=value: token_budget=8192")
    known = [*_File.model_fields, *(f"drafter.{one.name}" for one in fields(DrafterShape))]
    known.remove("drafter")
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        raise UsageError(
            f"--set {item}: a shape has no {key}",
            hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}",
        )
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--set {item}: {raw!r} is no number or list of numbers") from error
    table, _, name = key.rpartition(".")
    (tree[table] if table else tree)[name] = value


def _shape(tree: Mapping[str, Any], *, name: str, source: str) -> BenchShape:
    try:
        read = _File.model_validate(tree)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}"
            for one in error.errors()
        ]
        raise ConfigError(f"{source}: {'; '.join(problems)}") from error
    return BenchShape(
        name=name,
        drafter=read.drafter,
        token_budget=read.token_budget,
        num_anchors=read.num_anchors
        or num_anchors_for(read.token_budget, read.anchor_density, read.drafter.block_size),
        num_documents=read.num_documents,
    )
