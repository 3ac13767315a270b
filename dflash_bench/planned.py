"""What the memory plan of a run predicts for the cases of a bench, in GiB on the timed device."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from dflash.decode import static_bytes
from dflash.target.sizes import TargetSizes
from dflash.train.memory import (
    GIB,
    RunSizes,
    drafter_items,
    memory_plan,
    table_items,
    target_items,
)
from dflash_bench.cases._case import Setting
from dflash_bench.shapes import BenchShape

NO_DEVICE = "no device"
"""Of a target that a case does without, so that the drafter brings its own tables."""


def target_sizes(shape: BenchShape) -> TargetSizes:
    """The sizes of the target with random weights that the drafter of *shape* fits."""
    drafter = shape.drafter
    width, queries = drafter.hidden_size, drafter.num_heads * drafter.head_dim
    keys = drafter.num_kv_heads * drafter.head_dim
    layer = 2 * width * (queries + keys) + 3 * width * drafter.intermediate_size
    norms = 2 * width + 2 * drafter.head_dim
    tables = 2 * drafter.vocab_size * width
    return TargetSizes(
        config=SimpleNamespace(
            hidden_size=width,
            intermediate_size=drafter.intermediate_size,
            num_hidden_layers=drafter.num_target_layers,
            num_attention_heads=drafter.num_heads,
            num_key_value_heads=drafter.num_kv_heads,
            head_dim=drafter.head_dim,
        ),
        taps=drafter.target_layer_ids,
        num_parameters=drafter.num_target_layers * (layer + norms) + tables + width,
        tables=tables,
        vocab_size=drafter.vocab_size,
    )


def sizes_of(setting: Setting, *, targets: Sequence[str]) -> RunSizes:
    """The sizes of the run that *setting* is a part of."""
    shape = setting.shape
    return RunSizes(
        target=target_sizes(shape),
        shape=shape.drafter,
        targets=tuple(targets),
        drafters=setting.devices,
        target_dtype=dtype_on(targets[0]),
        compute_dtype=dtype_on(setting.devices[0]),
        token_budget=shape.token_budget,
        anchor_density=density_of(shape),
        accumulate_steps=1,
        checkpoint=shape.activation_checkpointing,
        fused=setting.mode != "eager",
        matmul=setting.matmul,
        chunk_blocks=shape.objective.chunk_blocks,
    )


def dtype_on(device: str) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU, as ``auto`` in a run."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def density_of(shape: BenchShape) -> float:
    """Anchors per position that a run rounds to exactly N."""
    return (shape.num_anchors - 0.5) / shape.token_budget


def drafter_step_gib(setting: Setting) -> float:
    """Every drafter on the first one's device, each with its batch and what it is cut from.

    The target's tables are there once.
    """
    sizes, device = sizes_of(setting, targets=[NO_DEVICE]), setting.devices[0]
    one = sum(drafter_items(sizes, on_gpu=device != "cpu").values()) + 2 * sizes.batch_bytes
    tables = sum(table_items(sizes, device).values())
    return (setting.devices.count(device) * one + tables) / GIB


def pipeline_gib(setting: Setting) -> float:
    """The whole plan of a run on the first drafter's device, and the full slot that is kept."""
    slot = sizes_of(setting, targets=[setting.target_device]).batch_bytes
    return plans_gib(setting)[setting.devices[0]] + slot / GIB


def plans_gib(setting: Setting) -> dict[str, float]:
    """The plan of a run for each of its devices."""
    plans = memory_plan(sizes_of(setting, targets=[setting.target_device]))
    return {plan.device: plan.predicted_bytes / GIB for plan in plans}


def target_gib(setting: Setting) -> float:
    """A target's forward; with all layers also logits, with plain attention also its mask."""
    device = setting.target_device
    sizes = sizes_of(setting, targets=[device])
    size, rows = sizes.target_dtype.itemsize, sizes.token_budget
    items = target_items(sizes, device)
    num_bytes = items["target weights"] + items["target forward"] + sizes.batch_bytes
    if setting.mode.startswith("whole"):
        num_bytes += rows * sizes.target.vocab_size * size
    if setting.mode.endswith("dense"):
        num_bytes += rows**2 * (1 + size)  # as booleans, and as what is added to scores
    return num_bytes / GIB


def decode_gib(setting: Setting, *, num_tokens: int) -> float:
    """Weights of both models, and the keys and values of a text of *num_tokens*."""
    target, shape = target_sizes(setting.shape), setting.shape.drafter
    size = dtype_on(setting.target_device).itemsize
    rows = static_bytes(target.config, shape, num_tokens=num_tokens, item_bytes=size)
    return (size * (target.num_parameters + shape.num_parameters) + rows) / GIB
