"""The run that a pipeline bench is, and what is told of its two sides."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dflash.config import DataConfig, DrafterConfig, RunConfig, TargetConfig
from dflash.config.sections import (
    ExecutionConfig,
    ObjectiveConfig,
    OptimConfig,
    PrecisionConfig,
)
from dflash.train.build import Built
from dflash.train.logbook import device_memory
from dflash_bench.cases._case import Setting
from dflash_bench.orders import Kind, Taken
from dflash_bench.planned import density_of, plans_gib

MAX_STEPS = 100_000
"""Of the learning rate's schedule, which no speed depends on."""


def run_config(setting: Setting, text: Path) -> RunConfig:
    """The run of *setting*, on *text* unless it names other data."""
    shape, drafter = setting.shape, setting.shape.drafter
    return RunConfig(
        seed=setting.seed,
        target=TargetConfig(
            model="random weights",
            taps=drafter.target_layer_ids,
            devices=(setting.target_device,),
        ),
        drafter=DrafterConfig(
            num_layers=drafter.num_layers,
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            devices=setting.devices,
        ),
        data=DataConfig(
            train=setting.data or (str(text),),
            token_budget=shape.token_budget,
            anchor_density=density_of(shape),
            max_document_tokens=shape.token_budget // shape.num_documents,
        ),
        objective=ObjectiveConfig(
            kind=shape.objective.kind,
            gamma=shape.objective.gamma,
            dpace_alpha=shape.objective.dpace_alpha,
        ),
        optim=OptimConfig(max_steps=MAX_STEPS),
        execution=ExecutionConfig.model_validate(
            {
                "mode": setting.mode,
                "activation_checkpointing": shape.activation_checkpointing,
            }
        ),
        precision=PrecisionConfig(matmul=setting.matmul),
    )


def both_sides(
    setting: Setting, built: Built, *, pipeline: Taken, alone: Mapping[Kind, Taken]
) -> dict[str, dict[str, object] | object]:
    """Return each side alone, both together, who waited, and what the plan says of each device."""
    devices = built.devices
    num_devices = len({*devices.targets, *devices.drafters})
    found: dict[str, object] = {}
    details: dict[str, object] = {
        "num_devices": num_devices,
        "fill": built.data.packing.fill(0),
        "documents_per_batch": built.data.packing.num_pieces
        / built.data.packing.batches_per_epoch(0),
        "planned_gib": plans_gib(setting),
        **device_memory(),
    }
    if pipeline.times_ms:
        # Milliseconds a batch, since the drafter's full slot holds other tokens than the rest.
        slower = max(alone, key=lambda side: alone[side].step_ms)
        found["slower side"] = slower
        found["of it alone"] = alone[slower].step_ms / pipeline.step_ms
        found["tok/s a device"] = pipeline.tokens_per_s / num_devices
        details["waits"] = asdict(pipeline.waits)
        details["advice"] = pipeline.waits.suggestion(devices.targets, devices.drafters)
    for name, taken in {**alone, "pipeline": pipeline}.items():
        if taken.times_ms:
            details[name] = {
                "step_ms": taken.step_ms,
                "tokens_per_s": taken.tokens_per_s,
                "steps": len(taken.times_ms),
            }
    return {**found, "details": details}
