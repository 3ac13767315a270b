"""The whole pipeline on real, packed text: a random target feeds a drafter, each also alone.

``python -m dflash_bench.pipeline --shape qwen3-8b-3072 --target-device cuda:0 --drafter-device
cuda:1`` drives the production pipeline and training loop. Alone, the target fills slots that are
free at once, and the drafter trains on one full slot again and again; both are measured before and
after the pipeline, in the same process.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from dflash.config import DataConfig, DrafterConfig, RunConfig, TargetConfig
from dflash.config.sections import ExecutionConfig, OptimConfig
from dflash.drafter.training import StepInputs
from dflash.execution import Mode, process_seal
from dflash.pipeline.assembly import Watchdog
from dflash.pipeline.cores import cores_shared_by
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.slots import FeatureSlot
from dflash.pipeline.waiting import Waits
from dflash.pipeline.workers import Span
from dflash.train.agreement import Agreement
from dflash.train.build import Built, build_around
from dflash.train.devices import settle_devices
from dflash.train.logbook import device_memory
from dflash.train.loop import Drafting, train_loop
from dflash.train.readiness import WarmRun, warm_up
from dflash.train.replicas import GradientSum
from dflash_bench.machine import machine_facts, say, write_json
from dflash_bench.marks import Marks, SlotThenPipeline, Window, joined, take_all
from dflash_bench.random_target import random_target, write_definitions
from dflash_bench.shapes import SHAPES

LOG_EVERY = 10
"""One step in ten is a metric step, as by default in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured: *steps* of the pipeline, *alone* of each side before and after them.

    The first *skipped* steps of every part fill the pipeline and are not counted.
    """

    shape: str
    mode: str
    target_device: str
    drafter_device: str
    steps: int = 100
    alone: int = 30
    skipped: int = 10
    data: tuple[str, ...] = ()
    seed: int = 0

    @property
    def all_steps(self) -> int:
        return self.steps + 2 * self.alone

    def config(self, text: Path) -> RunConfig:
        """The run that this is, on *text* unless other data was named."""
        shape = SHAPES[self.shape]
        return RunConfig(
            seed=self.seed,
            target=TargetConfig(
                model="random weights",
                taps=shape.drafter.target_layer_ids,
                devices=(self.target_device,),
            ),
            drafter=DrafterConfig(
                num_layers=shape.drafter.num_layers,
                block_size=shape.drafter.block_size,
                mask_token_id=shape.drafter.mask_token_id,
                devices=(self.drafter_device,),
            ),
            data=DataConfig(
                train=self.data or (str(text),),
                token_budget=shape.token_budget,
                anchor_density=shape.num_anchors / shape.token_budget,
                max_document_tokens=shape.token_budget // shape.num_documents,
            ),
            optim=OptimConfig(max_steps=self.all_steps),
            execution=ExecutionConfig.model_validate({"mode": self.mode}),
        )


def measure(settings: Settings) -> dict[str, Any]:
    """Build the run, measure each side alone and both together."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as scratch:
        folder = Path(scratch)
        config = settings.config(folder / "definitions.jsonl")
        devices = settle_devices(config)
        if not settings.data:
            write_definitions(folder / "definitions.jsonl")
        say("drawing the target's weights")
        target = random_target(
            SHAPES[settings.shape],
            device=torch.device(settings.target_device),
            dtype=devices.target_dtype,
            seed=settings.seed,
        )
        with cores_shared_by(devices.num_cpu_workers):
            say("packing and allocating")
            built = build_around([target], config, folder / "data", devices=devices)
            say("warming up")
            warm = warm_up(built, batch_number=0, unsafe=False, say=say)
            return _Bench(settings, warm).measure()


class _Bench:
    """One warm run, measured part by part."""

    def __init__(self, settings: Settings, warm: WarmRun) -> None:
        self.settings = settings
        self.warm = warm
        self.built: Built = warm.built
        self.stream = self.built.pipeline.streams[0]
        self.full_slot = _copy_of(self.built.pipeline.slots[0][0])

    def measure(self) -> dict[str, Any]:
        settings = self.settings
        say("target alone")
        target = [self._target_alone()]
        say("drafter alone, pipeline, drafter alone")
        marks = self._drafter_and_pipeline()
        say("target alone")
        target.append(self._target_alone())
        allocated = process_seal().open()
        first, last = settings.alone, settings.alone + settings.steps
        drafter = joined(
            [
                marks.window(settings.skipped, first),
                marks.window(last + settings.skipped, settings.all_steps),
            ]
        )
        pipeline = marks.window(first + settings.skipped, last)
        waits = _between(marks.waits[first + settings.skipped], marks.waits[last])
        return self._found(joined(target), drafter, pipeline) | {
            "waits": asdict(waits),
            "advice": waits.suggestion(self.built.devices.targets, self.built.devices.drafters),
            "device_allocs_after_warm_up": allocated,
        }

    def _found(self, target: Window, drafter: Window, pipeline: Window) -> dict[str, Any]:
        devices = self.built.devices
        slower = max(target, drafter, key=lambda window: window.step_ms)
        num_devices = len({*devices.targets, *devices.drafters})
        packing = self.built.data.packing
        return {
            "mode": devices.mode.mode,
            "mode_why": devices.mode.why,
            "warm_up_s": self.warm.warm_up_s,
            "fill": packing.fill(0),
            "documents_per_batch": packing.num_pieces / packing.batches_per_epoch(0),
            "target_alone": _shown(target),
            "drafter_alone": _shown(drafter),
            "pipeline": _shown(pipeline),
            # Milliseconds a batch, since the drafter's full slot holds other tokens than the rest.
            "against_slower_side": slower.step_ms / pipeline.step_ms,
            "slower_side": "target" if slower is target else "drafter",
            "num_devices": num_devices,
            "tokens_per_s_per_device": pipeline.tokens_per_s / num_devices,
            **device_memory(),
        }

    def _target_alone(self) -> Window:
        count, marks = self.settings.alone, Marks(self.stream is not None)
        self.built.pipeline.run(
            [take_all(count, marks, self.stream)],
            self.built.assemble,
            Span(0, count),
            life=Lifeline(),
            watchdog=Watchdog(300.0, None),
        )
        return marks.window(self.settings.skipped, count)

    def _drafter_and_pipeline(self) -> Marks:
        settings, built, step = self.settings, self.built, self.built.steps[0]
        first, last = settings.alone, settings.alone + settings.steps
        marks = Marks(self.stream is not None, waits_at={first + settings.skipped, last})
        loop = train_loop(
            Drafting(
                replica=0,
                step=step,
                runner=self.warm.ready.runners[0],
                gradient_sum=GradientSum(
                    built.steps, built.devices.gradient_sum, streams=built.pipeline.streams
                ),
                agreement=Agreement(built.steps, every_steps=0, last_step=settings.all_steps),
                schedule=built.schedule,
                wants_metrics=lambda number: number % LOG_EVERY == 0,
                boundary=marks,
                stream=self.stream,
            ),
            first_step=0,
            end_step=settings.all_steps,
            accumulate_steps=1,
        )
        self.built.pipeline.run(
            [
                lambda feed: loop(
                    SlotThenPipeline(
                        feed, self.full_slot, alone=settings.alone, together=settings.steps
                    )
                )
            ],
            built.assemble,
            Span(0, settings.steps),
            life=Lifeline(),
            watchdog=Watchdog(300.0, None),
            opening=self.warm.opening(),
        )
        return marks


def _copy_of(slot: FeatureSlot) -> FeatureSlot:
    return FeatureSlot(StepInputs(*(tensor.clone() for tensor in slot.inputs)), slot.facts)


def _shown(window: Window) -> dict[str, float]:
    return {
        "step_ms": window.step_ms,
        "tokens_per_s": window.tokens_per_s,
        "steps": window.steps,
    }


def _between(before: Waits, after: Waits) -> Waits:
    return Waits(**{name: value - asdict(before)[name] for name, value in asdict(after).items()})


def table(found: dict[str, Any]) -> str:
    """What each side does alone, what both do together, and who waited."""
    where = f"{found['target_device']} and {found['drafter_device']} ({found['device']})"
    lines = [
        f"{found['shape']} on {where}, mode {found['mode']}, torch {found['torch']}",
        f"documents a batch {found['documents_per_batch']:.1f}, filled {found['fill']:.2%}",
    ]
    for name in ("target_alone", "drafter_alone", "pipeline"):
        speed = f"{found[name]['tokens_per_s']:9.0f} real tokens/s"
        lines.append(f"{name.replace('_', ' '):<16} {found[name]['step_ms']:8.2f} ms/batch {speed}")
    against, per_device = found["against_slower_side"], found["tokens_per_s_per_device"]
    return "\n".join(
        [
            *lines,
            f"against the slower side alone ({found['slower_side']}): {against:.3f} x",
            f"real tokens/s per device ({found['num_devices']} counted): {per_device:.0f}",
            f"device allocations after warm-up: {found['device_allocs_after_warm_up']}",
            found["advice"],
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print a table."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--mode", choices=("auto", *get_args(Mode)), default="auto")
    parser.add_argument("--target-device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--drafter-device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=100, help="of the pipeline")
    parser.add_argument("--alone", type=int, default=30, help="of each side, before and after")
    parser.add_argument("--skipped", type=int, default=10, help="first ones of every part")
    parser.add_argument("--data", action="append", default=[], help="as data.train; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for everything that was found")
    given = vars(parser.parse_args(arguments))
    file = given.pop("json")
    settings = Settings(**{**given, "data": tuple(given["data"])})
    if settings.skipped >= min(settings.alone, settings.steps):
        parser.error("--skipped must be below --alone and --steps")
    found = {**asdict(settings), **measure(settings)}
    facts = machine_facts(
        torch.device(settings.drafter_device),
        case="pipeline",
        arguments=sys.argv[1:] if arguments is None else arguments,
    )
    write_json({**facts, **found}, file)
    print(table({**facts, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
