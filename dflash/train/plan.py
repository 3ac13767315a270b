"""The memory plan: what each device will hold, predicted from shapes alone, and then measured.

Predictions count what is kept at the moment of the highest peak, the start of the drafter's
backward pass. The activation terms follow what ``drafter.model`` saves for it, layer by layer.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.config import RunConfig
from dflash.drafter.shape import DrafterShape
from dflash.execution import Runner
from dflash.pipeline.cores import cores_shared_by
from dflash.pipeline.slots import slot_bytes
from dflash.target.model import Target
from dflash.train.build import Built, build, make_runners, settle_devices
from dflash.train.folder import DATA
from dflash.train.logbook import peak_resident_gib, resident_gib
from dflash.train.step import TrainStep

GIB = float(2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Bytes on one device by what they are for, and the measured peak when there is one."""

    device: str
    items: dict[str, int]
    measured_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a dry run saw."""

    plans: list[DevicePlan]
    loss: float
    step_s: float
    warm_up_s: float
    num_steps: int
    num_parameters: int
    num_anchors: int
    fill: float
    num_documents: int
    mode: str
    mode_why: str


def rehearse(config: RunConfig) -> Rehearsed:
    """Load everything, run one step, and compare the plan with what was used; writes nothing kept.

    Raises:
        DflashError: whatever a real run would raise before its first step.
    """
    before_gib = resident_gib()
    with (
        cores_shared_by(settle_devices(config).num_cpu_workers),
        tempfile.TemporaryDirectory(prefix="dflash-") as scratch,
    ):
        built = build(config, Path(scratch) / DATA)
        runners = make_runners(built, batch_number=0)
        for runner in runners:
            runner.warm_up()
            runner.enter_worker()
        started = time.perf_counter()
        loss = _one_step(built.steps, runners, built.schedule.at(0))
        step_s = time.perf_counter() - started
        plans = [
            DevicePlan(
                device=plan.device,
                items=plan.items,
                measured_bytes=_peak(plan.device, before_gib=before_gib),
            )
            for plan in memory_plan(built)
        ]
        return Rehearsed(
            plans=plans,
            loss=loss,
            step_s=step_s,
            warm_up_s=sum(runner.warm_up_s for runner in runners),
            num_steps=built.num_steps,
            num_parameters=built.shape.num_parameters,
            num_anchors=built.steps[0].loss.num_anchors,
            fill=built.data.packing.fill(0),
            num_documents=len(built.data.dataset),
            mode=built.devices.mode.mode,
            mode_why=built.devices.mode.why,
        )


def _one_step(steps: Sequence[TrainStep], runners: Sequence[Runner], lr: float) -> float:
    losses = []
    for step, runner in zip(steps, runners, strict=True):
        step.set_lr(lr)
        runner("metric")
        losses.append(float(step.loss_sum / step.weight_sum.clamp(min=1e-9)))
        runner("update")
    return sum(losses) / len(losses)


def _peak(device: str, *, before_gib: float) -> int:
    if device == "cpu":
        return int((peak_resident_gib() - before_gib) * GIB)
    return torch.cuda.max_memory_allocated(device)


def memory_plan(built: Built) -> list[DevicePlan]:
    """Predict the peak of every device of a run."""
    items: dict[str, dict[str, int]] = defaultdict(dict)
    for target in built.targets:
        items[str(target.device)].update(_target_items(target, built.data.packing.token_budget))
    for step, slots in zip(built.steps, built.pipeline.slots, strict=True):
        device = str(step.device)
        own = drafter_items(
            built.shape,
            token_budget=built.data.packing.token_budget,
            num_anchors=step.loss.num_anchors,
            compute=built.devices.compute_dtype,
            chunk_rows=step.loss.settings.chunk_blocks * (built.shape.block_size - 1),
            checkpoint=step.loss.checkpoint,
        )
        features = slots[0].inputs.features_TC
        one_batch = slot_bytes(
            token_budget=len(features), features_width=features.shape[1], dtype=features.dtype
        )
        own["feature slots"] = len(slots) * one_batch
        own["the step's own batch"] = one_batch
        own["embedding and LM head"] = sum(
            {
                tensor.data_ptr(): tensor.numel() * tensor.dtype.itemsize
                for tensor in (step.loss.embedding_VD, step.loss.lm_head_VD)
                if not any(_is_view_of(tensor, target) for target in built.targets)
            }.values()
        )
        if step.loss.attention == "split":
            own["dense attention"] = dense_attention_bytes(
                built.shape, step.loss.num_anchors, len(features), checkpoint=step.loss.checkpoint
            )
        items[device].update(own)
    return [DevicePlan(device=device, items=parts) for device, parts in sorted(items.items())]


def drafter_items(
    shape: DrafterShape,
    *,
    token_budget: int,
    num_anchors: int,
    compute: torch.dtype,
    chunk_rows: int,
    checkpoint: bool,
) -> dict[str, int]:
    """Predict the drafter's own bytes on its device, from its shape alone."""
    size = compute.itemsize
    weights = 4 * shape.num_parameters
    kept_layers = 1 if checkpoint else shape.num_layers
    rows = num_anchors * shape.block_size
    boundary = rows * shape.hidden_size * size * shape.num_layers if checkpoint else 0
    return {
        "fp32 weights": weights,
        "fp32 gradients": weights,
        "AdamW moments": 2 * weights,
        "weights in compute dtype": 0 if compute == torch.float32 else weights // 2,
        "activations of the layers": boundary
        + kept_layers * layer_activation_bytes(shape, token_budget, rows, size=size),
        "block embeddings and hidden states": 4 * rows * shape.hidden_size * size,
        "LM head chunk": chunk_rows * shape.vocab_size * (size + 4),
    }


def layer_activation_bytes(
    shape: DrafterShape, context_rows: int, block_rows: int, *, size: int
) -> int:
    """Bytes one decoder layer keeps for its backward pass.

    Per block row: the residual before each sublayer and its two norms (4 D), queries before and
    after norm and rotation and the attention's output (3 H d), gate, up and their product (3 I).
    Per key row (context and block): k before and after norm and rotation, and v (3 kv d).
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    per_block_row = 4 * hidden + 3 * queries + 3 * inner
    return size * (block_rows * per_block_row + (context_rows + block_rows) * 3 * keys)


def dense_attention_bytes(
    shape: DrafterShape, num_anchors: int, context_rows: int, *, checkpoint: bool
) -> int:
    """Bytes of fp32 attention weights: kept once a layer, and two gradients of them in flight."""
    copies = (1 if checkpoint else shape.num_layers) + 2
    keys = context_rows + shape.block_size
    return copies * 4 * shape.num_heads * num_anchors * shape.block_size * keys


def _target_items(target: Target, token_budget: int) -> dict[str, int]:
    weights = {p.data_ptr(): p.numel() * p.dtype.itemsize for p in target.model.parameters()}
    config = target.config
    width = 6 * target.hidden_size + 3 * int(config.intermediate_size)
    return {
        "target weights": sum(weights.values()),
        "target forward": token_budget * width * target.dtype.itemsize,
    }


def _is_view_of(tensor: torch.Tensor, target: Target) -> bool:
    return tensor.data_ptr() in (target.embedding_VD.data_ptr(), target.lm_head_VD.data_ptr())
