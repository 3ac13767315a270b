"""The memory plan: what each device will hold, predicted from sizes alone.

Predictions count what is kept at the moment of the highest peak, the start of the drafter's
backward pass. How they compare with memory there is, and with what was used, is in ``fit`` and
``rehearsal``.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from dflash.config import RunConfig, resolved_devices, resolved_dtype
from dflash.config.sections import Matmul
from dflash.drafter.masks import num_anchors_for
from dflash.drafter.model import is_lean
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.shape import DrafterShape
from dflash.pipeline.assembly import SLOTS_PER_TARGET
from dflash.pipeline.slots import slot_bytes
from dflash.target.shape import shape_for
from dflash.target.sizes import TargetSizes

GIB = float(2**30)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STAGINGS = 2
"""Batches that a target keeps on its own device on their way to a drafter on another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """Everything that the memory of a run depends on.

    ``fused`` says that the layers are compiled, whatever replays them: then a norm or product that
    is cheap to make again is not kept for the backward pass.
    """

    target: TargetSizes
    shape: DrafterShape
    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    target_dtype: torch.dtype
    compute_dtype: torch.dtype
    token_budget: int
    anchor_density: float
    accumulate_steps: int
    checkpoint: bool
    fused: bool
    matmul: Matmul = "bf16"
    chunk_blocks: int = ObjectiveSettings().chunk_blocks

    @property
    def num_anchors(self) -> int:
        """N."""
        return num_anchors_for(self.token_budget, self.anchor_density, self.shape.block_size)

    @property
    def slots_per_drafter(self) -> int:
        """Feature slots on each drafter's device."""
        return SLOTS_PER_TARGET * math.ceil(len(self.targets) / len(self.drafters))

    @property
    def batch_bytes(self) -> int:
        """One packed batch with its features."""
        return slot_bytes(
            token_budget=self.token_budget,
            features_width=self.target.features_width,
            dtype=self.compute_dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Bytes on one device by what they are for; where a run was made, the peaks that it measured.

    ``reserved_bytes`` is what torch took from a GPU, with the gaps between tensors.
    """

    device: str
    items: dict[str, int]
    measured_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int:
        return sum(self.items.values())


def run_sizes(config: RunConfig, target: TargetSizes, *, num_cuda: int, fused: bool) -> RunSizes:
    """Take the sizes of a run from its configuration, on a machine with *num_cuda* GPUs."""
    targets = resolved_devices(config.target.devices, num_cuda=num_cuda)
    drafters = resolved_devices(config.drafter.devices, num_cuda=num_cuda)
    return RunSizes(
        target=target,
        shape=shape_for(
            target.config,
            config.drafter,
            taps=target.taps,
            vocab_size=target.vocab_size,
            mask_token_id=0,  # any: it takes no memory, and the tokenizer that knows it may be away
        ),
        targets=targets,
        drafters=drafters,
        target_dtype=DTYPES[resolved_dtype(config.target.dtype, devices=targets)],
        compute_dtype=DTYPES[resolved_dtype(config.precision.compute, devices=drafters)],
        token_budget=config.data.token_budget,
        anchor_density=config.data.anchor_density,
        accumulate_steps=config.optim.accumulate_steps,
        checkpoint=config.execution.activation_checkpointing,
        fused=fused,
        matmul=config.precision.matmul,
    )


def memory_plan(sizes: RunSizes) -> list[DevicePlan]:
    """Predict the peak of every device of a run."""
    items: dict[str, Counter[str]] = defaultdict(Counter)
    for device in sizes.targets:
        items[device].update(target_items(sizes, device))
    for device in sizes.drafters:
        items[device].update(drafter_items(sizes, on_gpu=device != "cpu"))
        items[device]["feature slots"] += sizes.slots_per_drafter * sizes.batch_bytes
        items[device]["the step's own batch"] += sizes.batch_bytes
    for device in set(sizes.drafters):
        items[device].update(table_items(sizes, device))
    return [DevicePlan(device=name, items=dict(parts)) for name, parts in sorted(items.items())]


def target_items(sizes: RunSizes, device: str) -> dict[str, int]:
    """The frozen model, its forward's peak, and the batches it hands to other devices."""
    target, size = sizes.target, sizes.target_dtype.itemsize
    elsewhere = any(drafter != device for drafter in sizes.drafters)
    return {
        "target weights": target.num_parameters * size,
        "target forward": sizes.token_budget * target.forward_width * size,
        "batches on their way": STAGINGS * sizes.batch_bytes if elsewhere else 0,
    }


def drafter_items(sizes: RunSizes, *, on_gpu: bool) -> dict[str, int]:
    """One replica, its optimizer, and a step's peak: where its backward pass begins."""
    shape, size = sizes.shape, sizes.compute_dtype.itemsize
    rows = sizes.num_anchors * shape.block_size
    kept_layers = 1 if sizes.checkpoint else shape.num_layers
    between = rows * shape.hidden_size * size * shape.num_layers if sizes.checkpoint else 0
    a_layer = layer_activation_bytes(shape, sizes.token_budget, rows, size=size, fused=sizes.fused)
    dense = 0 if on_gpu else dense_attention_bytes(shape, sizes.num_anchors, sizes.token_budget)
    product = rows * shape.intermediate_size * size if sizes.fused and sizes.checkpoint else 0
    activations = between + product + kept_layers * (a_layer + dense)
    return {
        **weight_items(sizes, activations=activations),
        "activations of the layers": activations,
        "gradients of attention weights": 2 * dense,
        "block embeddings and hidden states": 4 * rows * shape.hidden_size * size,
        "LM head chunk or a layer's backward": max(
            # The gradients of gate and up, and their product once more, or its own gradient.
            _head_chunk_bytes(sizes),
            3 * rows * shape.intermediate_size * size,
        ),
    }


def table_items(sizes: RunSizes, device: str) -> dict[str, int]:
    """The target's embedding and LM head as drafters read them, once a device."""
    table, size = sizes.target.vocab_size * sizes.target.hidden_size, sizes.compute_dtype.itemsize
    of_target = device in sizes.targets and sizes.target_dtype == sizes.compute_dtype
    rounded = sizes.matmul != "bf16"
    return {
        "embedding and LM head": (table if rounded else sizes.target.tables) * size
        if not of_target
        else 0,
        "LM head in 8 bits": 2 * table if rounded else 0,
    }


def weight_items(sizes: RunSizes, *, activations: int) -> dict[str, int]:
    """Weights, gradients and optimizer state of one replica.

    A batch's gradients take the place of activations that the backward pass has done with, so they
    add only what they are larger by; what is summed over batches stays.
    """
    num, accumulates = sizes.shape.num_parameters, sizes.accumulate_steps > 1
    if sizes.compute_dtype == torch.float32:
        return {
            "fp32 weights": 4 * num,
            "fp32 gradients": 4 * num if accumulates else max(0, 4 * num - activations),
            "AdamW moments": 8 * num,
        }
    return {
        "bf16 weights": 2 * num,
        "fp32 masters": 4 * num,
        "bf16 gradients": max(0, 2 * num - activations),
        "fp32 sums of gradients": 4 * num if accumulates else 0,
        "AdamW moments": 8 * num,
    }


def layer_activation_bytes(
    shape: DrafterShape, context_rows: int, block_rows: int, *, size: int, fused: bool
) -> int:
    """Bytes one decoder layer keeps for its backward pass.

    Fused, per block row: the residual before each sublayer and its two norms (4 D), queries before
    and after norm and rotation and the attention's output (3 H d), gate and up (2 I; their product
    is made again); per key row (context and block): k before its norm, k and v (3 kv d; what
    repeats them for every query head is made again). With many block rows (``is_lean``) norms and
    rotated queries are made again as well, which leaves 2 D and 2 H d. Not fused, also every norm's
    fp32 input and unscaled output, the MLP's activation and its product, and k and v repeated
    (2 H d).
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    if fused:
        normed = 0 if is_lean(block_rows) else 1
        per_block_row = (2 + 2 * normed) * hidden + (2 + normed) * queries + 2 * inner
        per_key_row = 3 * keys
        return size * (block_rows * per_block_row + (context_rows + block_rows) * per_key_row)
    norms = (4 + size) * (2 * hidden + queries)
    per_block_row = norms + size * (2 * hidden + 3 * queries + 4 * inner)
    per_key_row = (4 + size) * keys + 2 * size * queries
    return block_rows * per_block_row + (context_rows + block_rows) * per_key_row


def _head_chunk_bytes(sizes: RunSizes) -> int:
    """Logits and their slope in the compute dtype; uncompiled, three fp32 tensors besides."""
    rows = min(sizes.chunk_blocks, sizes.num_anchors) * (sizes.shape.block_size - 1)
    size = sizes.compute_dtype.itemsize
    return rows * sizes.shape.vocab_size * (2 * size if sizes.fused else size + 12)


def dense_attention_bytes(shape: DrafterShape, num_anchors: int, context_rows: int) -> int:
    """Bytes of one layer's fp32 attention weights, where no kernel of flex attention runs."""
    keys = context_rows + shape.block_size
    return 4 * shape.num_heads * num_anchors * shape.block_size * keys
