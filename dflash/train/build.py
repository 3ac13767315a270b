"""From a configuration to everything a run works with, all of it allocated, nothing started."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.config import RunConfig, resolved_gamma
from dflash.data.batch import PackedBatch, assemble
from dflash.data.packing import Packing
from dflash.data.prepare import prepare
from dflash.data.prompts import heldout_prompts
from dflash.data.shards import TokenDataset
from dflash.drafter import fp8
from dflash.drafter.head import Head, head_for
from dflash.drafter.masks import num_anchors_for
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.shape import DrafterShape
from dflash.drafter.training import BlockLoss
from dflash.drafter.zlab import to_zlab
from dflash.errors import DataError
from dflash.pipeline.assembly import Pipeline
from dflash.pipeline.workers import Assemble
from dflash.target.model import Target
from dflash.target.shape import default_shape
from dflash.train.adamw import AdamSettings
from dflash.train.devices import Devices, require_wide_heads, settle_devices
from dflash.train.fit import require_room
from dflash.train.initial import initial_drafter
from dflash.train.schedule import Cosine
from dflash.train.step import TrainStep


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on and judged with."""

    dataset: TokenDataset
    packing: Packing
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A run ready to be warmed up."""

    devices: Devices
    targets: list[Target]
    data: Data
    shape: DrafterShape
    pipeline: Pipeline
    steps: list[TrainStep]
    schedule: Cosine
    num_steps: int
    assemble: Assemble
    contract: dict[str, Any]
    notes: tuple[str, ...]


def load_targets(config: RunConfig, devices: Devices) -> list[Target]:
    """Load the target once per target device."""
    taps = config.target.num_taps if config.target.taps == "auto" else config.target.taps
    return [
        Target.load(
            config.target.model,
            taps=taps,
            device=device,
            dtype=devices.target_dtype,
            trust_remote_code=config.target.trust_remote_code,
        )
        for device in devices.targets
    ]


def read_data(config: RunConfig, target: Target, folder: Path) -> Data:
    """Prepare training and held-out data below *folder* (reused when it is already there).

    Raises:
        DataError: what ``prepare`` raises, or nothing to train on.
    """

    def prepared(sources: tuple[str, ...], name: str) -> TokenDataset:
        return prepare(
            sources,
            folder / name,
            tokenizer=target.tokenizer,
            max_document_tokens=config.data.max_document_tokens,
            max_bad_share=config.data.max_bad_share,
            vocab_size=target.vocab_size,
        )

    dataset = prepared(config.data.train, "train")
    prompts = []
    if config.data.heldout:
        prompts = heldout_prompts(
            prepared(config.data.heldout, "heldout"),
            num_prompts=config.eval.num_prompts,
            seed=config.seed,
        )
    packing = Packing(
        dataset.lengths,
        token_budget=config.data.token_budget,
        seed=config.seed,
        max_document_tokens=config.data.max_document_tokens,
    )
    return Data(dataset, packing, prompts)


def build(config: RunConfig, data_folder: Path) -> Built:
    """Load, prepare and allocate everything that *config* asks for.

    Raises:
        DflashError: of every kind that a bad input can cause.
    """
    devices = settle_devices(config)
    notes = (*devices.notes, *require_room(config, fused=devices.mode.mode != "eager"))
    built = build_around(load_targets(config, devices), config, data_folder, devices=devices)
    return replace(built, notes=notes)


def build_around(
    targets: list[Target], config: RunConfig, data_folder: Path, *, devices: Devices
) -> Built:
    """The same around targets that are there already, one on each target device.

    Raises:
        DflashError: of every kind that bad data or a bad shape can cause.
    """
    data = read_data(config, targets[0], data_folder)
    shape = default_shape(targets[0], config.drafter)
    batches_per_step = config.optim.accumulate_steps * len(devices.drafters)
    num_steps = count_steps(config, data.packing, batches_per_step)
    pipeline = Pipeline(
        targets,
        [torch.device(name) for name in devices.drafters],
        token_budget=config.data.token_budget,
        features_dtype=devices.compute_dtype,
    )
    return Built(
        devices=devices,
        targets=targets,
        data=data,
        shape=shape,
        pipeline=pipeline,
        steps=make_steps(config, devices, shape, targets=targets),
        schedule=Cosine(
            peak=config.optim.lr,
            floor=config.optim.lr * config.optim.min_lr_ratio,
            warmup_steps=round(config.optim.warmup_ratio * num_steps),
            num_steps=num_steps,
        ),
        num_steps=num_steps,
        assemble=assembler(data, pinned=any(d.startswith("cuda") for d in devices.targets)),
        contract=contract_of(
            config, shape, targets[0], data=data, batches_per_step=batches_per_step
        ),
        notes=devices.notes,
    )


def count_steps(config: RunConfig, packing: Packing, batches_per_step: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        DataError: the epochs hold less than one step.
    """
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    assert config.optim.epochs is not None, "the configuration has neither max_steps nor epochs"
    num_steps = packing.first_batch(config.optim.epochs) // batches_per_step
    if num_steps == 0:
        raise DataError(
            f"{config.optim.epochs} epochs hold {packing.first_batch(config.optim.epochs)} packed"
            f" batches, but one step takes {batches_per_step}",
            hint="lower optim.accumulate_steps or data.token_budget, or give more data",
        )
    return num_steps


def make_steps(
    config: RunConfig,
    devices: Devices,
    shape: DrafterShape,
    *,
    targets: list[Target],
) -> list[TrainStep]:
    """Build one replica per drafter device, all with the same weights.

    Raises:
        ConfigError: a width that attention on a GPU or 8-bit products cannot have.
    """
    require_wide_heads(shape.head_dim, devices.drafters)
    if config.precision.matmul != "bf16":
        fp8.require_widths(shape)
    steps = []
    names = dict.fromkeys(devices.drafters)
    tables = {name: _tables(config, devices, targets, name=name) for name in names}
    for name in devices.drafters:
        device = torch.device(name)
        drafter = initial_drafter(config, shape).to(device)
        loss = BlockLoss(
            drafter,
            embedding_VD=tables[name][0],
            head=tables[name][1],
            settings=ObjectiveSettings(
                kind=config.objective.kind,
                gamma=resolved_gamma(config),
                dpace_alpha=config.objective.dpace_alpha,
            ),
            num_anchors=num_anchors_for(
                config.data.token_budget, config.data.anchor_density, shape.block_size
            ),
            seed=config.seed,
            attention="split" if device.type == "cpu" else "flex",
            checkpoint=config.execution.activation_checkpointing,
        )
        settings = AdamSettings(
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            clip_norm=config.optim.clip_norm,
        )
        steps.append(
            TrainStep(
                loss,
                settings,
                token_budget=config.data.token_budget,
                features_dtype=devices.compute_dtype,
                accumulates=config.optim.accumulate_steps > 1,
            )
        )
    return steps


def assembler(data: Data, *, pinned: bool) -> Assemble:
    """Return what the loader calls: the batch of a number, in buffers that are used again."""
    token_budget = data.packing.token_budget

    def assembled(number: int, out: PackedBatch | None) -> PackedBatch:
        buffers = out or PackedBatch.allocate(token_budget, pinned=pinned)
        return assemble(data.dataset, data.packing, number, out=buffers)

    return assembled


def contract_of(
    config: RunConfig, shape: DrafterShape, target: Target, *, data: Data, batches_per_step: int
) -> dict[str, Any]:
    """What a checkpoint and a run that goes on from it must agree in, in JSON's types."""
    fixed = {f"drafter.{key}": value for key, value in to_zlab(shape, dtype="float32").items()}
    return fixed | {
        "seed": config.seed,
        "target.fingerprint": target.fingerprint,
        "target.taps": list(target.taps),
        "data.sha256": data.dataset.manifest.key,
        "data.token_budget": config.data.token_budget,
        "data.max_document_tokens": config.data.max_document_tokens,
        "data.anchor_density": config.data.anchor_density,
        "objective.kind": config.objective.kind,
        "packed batches per step": batches_per_step,
    }


def _tables(
    config: RunConfig, devices: Devices, targets: list[Target], *, name: str
) -> tuple[Tensor, Head]:
    """The embedding and the head on device *name*: the target's own where it is there."""
    device = torch.device(name)
    near = next((t for t in targets if torch.device(t.device) == device), targets[0])
    embedding_VD = near.embedding_VD.to(device, devices.compute_dtype)
    tied = near.lm_head_VD.data_ptr() == near.embedding_VD.data_ptr()
    head_VD = embedding_VD if tied else near.lm_head_VD.to(device, devices.compute_dtype)
    return embedding_VD, head_for(head_VD, config.precision.matmul)
