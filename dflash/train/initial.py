"""The drafter that a run starts with: random weights, or those of another."""

from dataclasses import fields
from pathlib import Path

import torch

from dflash.config import RunConfig, toml_value
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.errors import CheckpointError
from dflash.train.stored import open_checkpoint

SETTINGS = {
    "target_layer_ids": "target.taps",
    **{
        name: f"drafter.{name}"
        for name in (
            "num_layers",
            "block_size",
            "mask_token_id",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        )
    },
}
"""Where a shape's field is set; every other one follows from the target."""


def initial_drafter(config: RunConfig, shape: DrafterShape) -> Drafter:
    """Build a drafter of *shape* on the CPU.

    Raises:
        CheckpointError: ``drafter.init_from`` names none, or one of another shape.
    """
    drafter = Drafter(shape)
    if config.drafter.init_from is None:
        drafter.initialise(config.seed)
        return drafter
    stored = open_checkpoint(Path(config.drafter.init_from))
    _require_shape(stored.shape, shape, source=config.drafter.init_from)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(stored.weights[name])
    return drafter


def _require_shape(there: DrafterShape, here: DrafterShape, *, source: str) -> None:
    names = [field.name for field in fields(here)]
    values = {
        SETTINGS.get(name, f"the target's {name}"): (getattr(there, name), getattr(here, name))
        for name in names
        if getattr(there, name) != getattr(here, name)
    }
    if not values:
        return
    told = [
        f"{key} = {toml_value(a)} there, {toml_value(b)} here" for key, (a, b) in values.items()
    ]
    settings = [f"{key} = {toml_value(a)}" for key, (a, _) in values.items()]
    for_this_target = values.keys() <= set(SETTINGS.values())
    raise CheckpointError(
        f"drafter.init_from = {toml_value(source)} holds another drafter than this run's:"
        f" {'; '.join(told)}",
        hint=f"set {', '.join(settings)}"
        if for_this_target
        else "that drafter was made for another target; start from one of this target's, or leave"
        " drafter.init_from out",
    )
