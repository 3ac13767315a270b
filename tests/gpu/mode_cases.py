"""A small drafter's training step on a GPU, and fifty batches of different documents for it."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from drafter_cases import step_inputs
from tiny_runs import SECTIONS, events_of, run, tiny_config
from torch import Tensor

from dflash.config import DataConfig, RunConfig, TargetConfig
from dflash.drafter.shape import DrafterShape
from dflash.drafter.training import StepInputs
from dflash.execution import Mode, Runner
from dflash.train.build import make_steps
from dflash.train.devices import settle_devices
from dflash.train.step import TrainStep

DEVICE = torch.device("cuda:0")
TOKEN_BUDGET = 1024
SHAPE = DrafterShape(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    block_size=16,
    mask_token_id=2047,
    vocab_size=2048,
    rope_theta=1e4,
)


def make_step(**changes: dict[str, Any]) -> TrainStep:
    """A step of 128 anchors; equal weights each time. *changes* replace keys by section."""
    sections: dict[str, dict[str, Any]] = {
        "drafter": {"devices": ("cuda:0",)},
        "optim": {"max_steps": 100},
    }
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    config = RunConfig(
        target=TargetConfig(model="none", devices=("cuda:0",)),
        data=DataConfig(
            train=("none",),
            token_budget=TOKEN_BUDGET,
            max_document_tokens=512,
            anchor_density=0.125,
        ),
        **{name: SECTIONS[name](**keys) for name, keys in sections.items()},
    )
    random = torch.Generator(DEVICE).manual_seed(0)
    size = (SHAPE.vocab_size, SHAPE.hidden_size)
    tables = [
        torch.randn(size, device=DEVICE, generator=random).mul_(0.05).bfloat16() for _ in range(2)
    ]
    target: Any = SimpleNamespace(device=DEVICE, embedding_VD=tables[0], lm_head_VD=tables[1])
    (step,) = make_steps(config, settle_devices(config), SHAPE, targets=[target])
    return step


def batches(count: int) -> list[StepInputs]:
    """Packed documents whose lengths and number differ from batch to batch, on the GPU."""
    found = []
    for number in range(count):
        lengths = [100 + 7 * number, 300 - 3 * number, 200, *[40] * (number % 5)]
        inputs = step_inputs(
            lengths, token_budget=TOKEN_BUDGET, supervised_share=0.9, shape=SHAPE, seed=number
        )
        inputs = inputs._replace(features_TC=inputs.features_TC.bfloat16())
        found.append(StepInputs(*(tensor.to(DEVICE) for tensor in inputs)))
    return found


class Trained:
    """What some steps gave: the sums of each, and the weights after the last."""

    def __init__(self, sums: Tensor, weights: dict[str, Tensor], runner: Runner) -> None:
        self.sums = sums
        self.losses = sums[:, 0] / sums[:, 1]
        self.weights = weights
        self.runner = runner


def in_worker(body: Callable[[], None]) -> None:
    """Run *body* in a thread of its own, and raise here what it raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=guarded, name="drafter-0")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def train(
    mode: Mode,
    data: list[StepInputs],
    *,
    step: TrainStep | None = None,
    meanwhile: Callable[[threading.Event], None] | None = None,
) -> Trained:
    """Warm up here, then train in a worker; every tenth step is a metric batch.

    *meanwhile* runs in another thread until it is told to stop.
    """
    step = step or make_step()
    runner = Runner(step, mode)
    runner.feed(data[0]._asdict())
    runner.warm_up()
    rows: list[Tensor] = []
    stop = threading.Event()
    beside = threading.Thread(target=meanwhile, args=(stop,)) if meanwhile else None

    def work() -> None:
        runner.enter_worker()
        if beside is not None:
            beside.start()
        with torch.cuda.stream(runner.stream):
            for number, inputs in enumerate(data):
                one_step(runner, step, inputs, number=number)
                rows.append(step.totals.sums.clone())
                step.totals.zero()
        torch.cuda.synchronize(DEVICE)

    try:
        in_worker(work)
    finally:
        stop.set()
        if beside is not None and beside.is_alive():
            beside.join()
    weights = {name: master.clone() for name, master in step.masters.items()}
    return Trained(torch.stack(rows).cpu(), weights, runner)


def one_step(runner: Runner, step: TrainStep, inputs: StepInputs, *, number: int) -> None:
    """What the training loop does for one batch."""
    runner.feed(inputs._asdict())
    runner("metric" if number % 10 == 9 else "normal")
    step.set_lr(1e-3)
    runner("update")


def busy(stop: threading.Event) -> None:
    """A target's thread at its worst."""
    torch.cuda.set_device(DEVICE)
    left = torch.randn(512, 512, device=DEVICE)
    while not stop.is_set():
        left = (left @ left).tanh()
        torch.empty(1 << 22, device=DEVICE).fill_(1)
        event = torch.cuda.Event()
        event.record()
        event.query()
        torch.ones(1 << 16).pin_memory().to(DEVICE, non_blocking=True)
        torch.cuda.synchronize()


def allocate_nothing(place: Path, run_dir: Path, mode: Mode) -> None:
    """Two hundred steps, with checkpoints, of documents that differ in number and length."""
    gpu = {"devices": ("cuda:0",)}
    config = tiny_config(
        place,
        target=gpu,
        drafter=gpu,
        execution={"mode": mode},
        optim={"max_steps": 200},
        checkpoint={"every_steps": 100},
    )
    allocs: list[int] = []

    def show(record: object) -> None:
        if getattr(record, "kind", "") == "step":
            allocs.append(record.device_allocs["cuda:0"])  # type: ignore[attr-defined]

    run(config, run_dir, show=show)
    assert len(set(allocs)) == 1, allocs
    late = events_of(run_dir, "allocated_while_sealed")
    assert late == [], [event.detail for event in late]
    (entered,) = events_of(run_dir, "entered")
    assert entered.detail["sealed"] is True
    (drafter,) = entered.detail["drafters"]
    assert (mode == "compiled") == ("worker_difference" not in drafter)


def goes_on(place: Path, folder: Path, mode: Mode) -> None:
    """A run that was stopped half way records the losses of one that was not."""
    gpu = {"devices": ("cuda:0",)}
    config = tiny_config(place, target=gpu, drafter=gpu, execution={"mode": mode})
    losses: dict[str, list[float]] = {"whole": [], "parts": []}

    def show(name: str) -> Callable[[object], None]:
        def see(record: object) -> None:
            if getattr(record, "kind", "") == "step":
                losses[name].append(record.loss)  # type: ignore[attr-defined]

        return see

    run(config, folder / "whole", show=show("whole"))
    run(config, folder / "parts", max_steps=20, show=show("parts"))
    run(config, folder / "parts", show=show("parts"))
    assert losses["parts"] == losses["whole"]
