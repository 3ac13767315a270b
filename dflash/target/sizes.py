"""How large a target is, known from its config alone: no weight is read, none is needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash.config import TargetConfig
from dflash.errors import ConfigError, MissingError
from dflash.target.gguf_file import require_gguf
from dflash.target.loading import REMOTE_CODE_HINT, resolve_source
from dflash.target.taps import check_taps, default_taps


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """What decides the memory of a target, and the shape of its drafter.

    ``tables`` counts the scalars of the embedding table and of the LM head, once where they are
    tied. ``config`` is transformers' text config.
    """

    config: Any
    taps: tuple[int, ...]
    num_parameters: int
    tables: int
    vocab_size: int

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    @property
    def features_width(self) -> int:
        """C, the width of the tapped hidden states of one position."""
        return len(self.taps) * self.hidden_size

    @property
    def forward_width(self) -> int:
        """Scalars of one position that a layer's forward holds at its peak.

        The residual, its norm, queries, keys, values and the attention's output (6 D), and the
        MLP's gate, up and product (3 I).
        """
        return 6 * self.hidden_size + 3 * int(self.config.intermediate_size)


def read_sizes(target: TargetConfig) -> TargetSizes:
    """Read the config of ``target.model``: a folder with a config.json, a GGUF file, "stdlib-lm".

    Raises:
        MissingError: it is not there, or has no config.
        ConfigError: the config is of no causal LM that transformers knows.
    """
    path = resolve_source(target.model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise MissingError(
            f"{path} holds no config.json, so its sizes are not known",
            hint="the config.json of the model is enough for a plan; the weights are not read",
        )
    return sizes_of(
        _skeleton(path, target), taps=target.num_taps if target.taps == "auto" else target.taps
    )


def sizes_of(model: Any, *, taps: tuple[int, ...] | int) -> TargetSizes:  # noqa: ANN401
    """Count a transformers causal LM, loaded or on the meta device."""
    config = model.config.get_text_config(decoder=True)
    num_layers = int(config.num_hidden_layers)
    embedding: nn.Parameter = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tables = {id(table): table.numel() for table in (embedding, getattr(head, "weight", embedding))}
    return TargetSizes(
        config=config,
        taps=default_taps(num_layers, taps)
        if isinstance(taps, int)
        else check_taps(taps, num_layers=num_layers),
        num_parameters=sum(p.numel() for p in model.parameters()),
        tables=sum(tables.values()),
        vocab_size=len(embedding),
    )


def _skeleton(path: Path, target: TargetConfig) -> Any:  # noqa: ANN401 (a transformers model)
    """The model without its weights, on the meta device."""
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        require_gguf(path)
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    trust = target.trust_remote_code
    auto: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(
            **place, local_files_only=True, trust_remote_code=trust
        )
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        remote = "trust_remote_code" in str(error)
        raise ConfigError(
            f"target.model: the config of {path} cannot be read: {first.rstrip('.')}",
            hint=REMOTE_CODE_HINT if remote else "check the folder with transformers itself",
        ) from error
