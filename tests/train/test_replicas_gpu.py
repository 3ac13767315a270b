"""On GPUs: drafters on two devices, or on one, train one model in every mode that can."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tiny_runs import checkpoint, events_of, run, steps_of, tiny_config

from dflash.execution import Mode
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.slots import BatchFacts
from dflash.train.devices import SumChoice, choose_sum
from dflash.train.replicas import GradientSum

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA GPU"),
    # Advice of the compiler about speed.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    # Torch begins its trees with one, and records the warning, which "error" would raise instead.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")
# Several drafters that capture lazily are what the trainer refuses.
MODES = [mode for mode in get_args(Mode) if mode != "reduce-overhead"]
PLACES = [
    pytest.param(("cuda:0",), ("cuda:0", "cuda:0"), id="all on one GPU"),
    pytest.param(("cuda:0",), ("cuda:0", "cuda:1"), marks=two_gpus, id="1 target, 2 drafters"),
    pytest.param(
        ("cuda:0", "cuda:1"), ("cuda:0", "cuda:1"), marks=two_gpus, id="2 targets, 2 drafters"
    ),
    pytest.param(
        ("cuda:0", "cuda:1"), ("cuda:1", "cuda:1"), marks=two_gpus, id="2 targets, both on one"
    ),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("targets", "drafters"), PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_two_drafters_are_one_with_twice_the_batch(  # noqa: PLR0917
    place: Path,
    tmp_path: Path,
    mode: str,
    targets: tuple[str, ...],
    drafters: tuple[str, ...],
    precision: str,
) -> None:
    """fp32: the same gradients, added in another order and by kernels that add with atomics; Adam
    turns what is left of a tiny gradient into a step of up to lr. bf16: two drafters add bf16
    gradients of one batch each, one drafter adds them in fp32, so only losses are compared."""
    if mode == "warmed" and len(set(drafters)) < len(drafters):
        pytest.skip("refused: torch keeps one set of cudagraph trees a device")
    for name, devices in (("one", drafters[:1]), ("two", drafters)):
        config = tiny_config(
            place,
            target={"devices": targets, "dtype": precision},
            drafter={"devices": devices},
            execution={"mode": mode, "check_replicas_every": 1},
            precision={"compute": precision},
            optim={"max_steps": 12, "lr": 1e-3, "accumulate_steps": 2 // len(devices)},
        )
        run(config, tmp_path / name)
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [record["tokens"] for record in two] == [record["tokens"] for record in one]
    losses = [record["loss"] for record in one]
    close = 1e-3 if precision == "fp32" else 2e-2
    assert [record["loss"] for record in two] == pytest.approx(losses, rel=close)
    assert not events_of(tmp_path / "two", "allocated_while_sealed")
    if precision == "fp32":
        tensors, others = (checkpoint(tmp_path / name, 12) for name in ("one", "two"))
        for name, weight in tensors.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize(("targets", "drafters"), PLACES)
def test_nothing_is_allocated_once_two_drafters_are_warm(
    place: Path, tmp_path: Path, *, targets: tuple[str, ...], drafters: tuple[str, ...]
) -> None:
    """200 steps of texts of different lengths, replicas compared at every tenth."""
    counts: list[dict[str, int]] = []

    def show(record: Any) -> None:  # noqa: ANN401
        if record.kind == "step":
            counts.append(record.device_allocs)

    config = tiny_config(
        place,
        target={"devices": targets},
        drafter={"devices": drafters},
        execution={"mode": "compiled", "check_replicas_every": 10},
        optim={"max_steps": 200},
        checkpoint={"every_steps": 200},
    )
    run(config, tmp_path / "run", show=show)
    assert len(counts) == 50
    assert all(count == counts[0] for count in counts), counts


def replica(device: str, seed: int, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """What a sum knows of a training step: gradients of several sizes, and measurements."""
    random = torch.Generator(device).manual_seed(seed)
    shapes = [(1024, 3000), (128,), (7, 5), (1,), (4096, 1024)]
    gradients = [torch.randn(shape, device=device, generator=random).to(dtype) for shape in shapes]
    sums = torch.randn(21, device=device, dtype=torch.float64, generator=random)
    return SimpleNamespace(
        device=torch.device(device),
        parameters=gradients,
        gradients=lambda: gradients,
        totals=SimpleNamespace(step_sums=sums),
    )


def summed(steps: list[Any], choice: SumChoice, *, rounds: int) -> list[list[torch.Tensor]]:
    """Sum *rounds* times from threads, each behind a stream that is slow; what each replica has.

    Nobody waits for a device before the very end, so a sum that starts before a gradient is there,
    or an update that starts before the sum, would read other numbers.
    """
    streams = [torch.cuda.Stream(step.device) for step in steps]
    summing = GradientSum(steps, choice, streams=streams)
    summing.warm_up()
    kept: list[list[torch.Tensor]] = [[] for _ in steps]
    facts = BatchFacts(
        number=0, num_real_tokens=1, num_supervised_tokens=1, num_documents=1, rows=()
    )

    def body(index: int) -> None:
        step = steps[index]
        first = [g.clone() for g in (*step.gradients(), step.totals.step_sums)]
        torch.cuda.synchronize(step.device)
        with torch.cuda.device(step.device), torch.cuda.stream(streams[index]):
            for turn in range(rounds):
                torch.cuda._sleep(3_000_000 * (1 + (turn + index) % 2))  # noqa: SLF001
                for gradient, start in zip(
                    (*step.gradients(), step.totals.step_sums), first, strict=True
                ):
                    gradient.copy_(start * (turn + 1))
                summing(index, [facts], Lifeline())
                kept[index] += [g.clone() for g in (*step.gradients(), step.totals.step_sums)]
        torch.cuda.synchronize(step.device)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "devices",
    [
        ("cuda:0", "cuda:0"),
        ("cuda:0", "cuda:0", "cuda:0"),
        pytest.param(("cuda:0", "cuda:1"), marks=two_gpus),
        pytest.param(("cuda:1", "cuda:0"), marks=two_gpus),
    ],
    ids=str,
)
def test_every_sum_gives_all_replicas_the_same_bits(
    devices: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Two numbers have one sum, whatever adds them; three are added in another order each time."""
    auto = choose_sum("auto", devices)
    assert auto.kind == ("nccl" if len(set(devices)) == len(devices) else "fixed_order")
    fixed = SumChoice("fixed_order", "a test")
    results = []
    for choice in dict.fromkeys([auto.kind, fixed.kind]):
        steps = [replica(device, seed, dtype) for seed, device in enumerate(devices)]
        start = [[g.cpu() for g in (*s.gradients(), s.totals.step_sums)] for s in steps]
        kept = summed(steps, auto if choice == auto.kind else fixed, rounds=4)
        on_host = [[tensor.cpu() for tensor in one] for one in kept]
        for other in on_host[1:]:
            assert all(a.equal(b) for a, b in zip(on_host[0], other, strict=True))
        for position, found in enumerate(on_host[0]):
            turn, number = divmod(position, len(start[0]))
            scaled = [(one[number] * (turn + 1)).double() for one in start]
            parts = torch.stack(scaled)
            # Each addition rounds to half a unit in the last place, and no partial sum is larger
            # than the sum of sizes.
            within = (len(scaled) - 1) * torch.finfo(found.dtype).eps * parts.abs().sum(0)
            assert bool(((found.double() - parts.sum(0)).abs() <= within).all())
        results.append(on_host[0])
    if len(devices) == 2:
        assert all(a.equal(b) for a, b in zip(results[0], results[-1], strict=True))
