"""The shapes that cases run at: ``configs/bench/*.toml``, overrides, and a user's own config."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash.drafter.masks import num_anchors_for
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.shape import DrafterShape
from dflash.errors import ConfigError
from dflash_bench.shape_files import read_shape
from dflash_bench.shape_rules import SIZES, problems_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """A drafter and its packed batches: documents of equal length, all supervised.

    Attributes:
        name: of a file in ``configs/bench``, with its overrides; or a config's own file name.
        token_budget: T.
        num_anchors: N, also where a batch is shorter than T.

    Raises:
        ConfigError: no batch can have these numbers; every broken rule is listed.
    """

    name: str
    drafter: DrafterShape
    token_budget: int
    num_anchors: int
    num_documents: int
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        parts = {"drafter": asdict(self.drafter), "objective": asdict(self.objective)}
        if problems := problems_of(sizes, block_size=self.drafter.block_size, parts=parts):
            raise ConfigError(f"shape {self.name}: {'; '.join(problems)}")

    def record(self) -> dict[str, Any]:
        """Every number of it, as JSON reads it back."""
        numbers = asdict(self)
        numbers["drafter"]["target_layer_ids"] = list(self.drafter.target_layer_ids)
        return numbers

    def with_(self, **changes: Any) -> "BenchShape":  # noqa: ANN401 - any of the fields
        """The same with other numbers; give it a name of its own."""
        return replace(self, **changes)


def named_shape(name: str, overrides: Sequence[str] = ()) -> BenchShape:
    """Read a shape of ``configs/bench``; *overrides* are ``token_budget=8192``.

    Raises:
        UsageError: there is none of that name; suggests the nearest.
        ConfigError: an override breaks a rule.
    """
    read = read_shape(name, overrides)
    return BenchShape(
        name=_name(name, overrides),
        drafter=read.drafter,
        token_budget=read.token_budget,
        num_anchors=num_anchors_for(read.token_budget, read.anchor_density, read.drafter.block_size)
        if read.num_anchors is None
        else read.num_anchors,
        num_documents=read.num_documents,
    )


def _name(name: str, overrides: Sequence[str]) -> str:
    """``tiny:token_budget=8192``, on one line however the overrides are written."""
    parts = (item.partition("=") for item in overrides)
    told = [f"{key.strip()}={' '.join(value.split())}" for key, _, value in parts]
    return ":".join([" ".join(name.split()), *told])


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
        name=_name(path.stem, overrides),
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
