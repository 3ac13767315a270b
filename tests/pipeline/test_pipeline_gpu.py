"""On GPUs: the features are the target's own, streams never race, and nothing is allocated late."""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_runs import assert_same_tensors, checkpoint, events_of, run, tiny_config

from dflash.data.batch import assemble
from dflash.pipeline.assembly import Pipeline, Watchdog
from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.workers import Span
from dflash.target.model import Target
from dflash.train.build import assembler, read_data

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA GPU"),
    # Advice of the compiler about speed.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")
NUM_BATCHES = 24


def spin(stream_cycles: int = 2_000_000) -> None:
    """Keep the current stream busy for about a millisecond, so that a missing wait shows."""
    torch.cuda._sleep(stream_cycles)  # noqa: SLF001


@pytest.mark.parametrize(
    ("target_device", "drafter_device"),
    [
        ("cuda:0", "cuda:0"),
        pytest.param("cuda:0", "cuda:1", marks=two_gpus),
        ("cpu", "cuda:0"),
        ("cuda:0", "cpu"),
    ],
)
def test_a_slow_reader_always_finds_its_own_batch(
    place: Path, tmp_path: Path, *, target_device: str, drafter_device: str
) -> None:
    config, device = tiny_config(place), torch.device(drafter_device)
    target = Target.load(
        config.target.model, taps=(0, 2), device=target_device, dtype=torch.float32
    )
    data = read_data(config, target, tmp_path)
    pipeline = Pipeline([target], [device], token_budget=128, features_dtype=torch.float32)
    pipeline.prime(assembler(data, pinned=target_device != "cpu"), 0)
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def drafter(feed: Feed) -> None:
        with torch.cuda.stream(pipeline.streams[0]):
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []

            def into(tensors: Mapping[str, torch.Tensor]) -> None:
                if device.type == "cuda":
                    spin()
                copies.append((tensors["tokens_T"].clone(), tensors["features_TC"].clone()))
                if device.type == "cuda":
                    spin()

            batches = feed.batches(NUM_BATCHES, into=into)
            seen.extend((facts.number, *copies.pop()) for facts in batches)

    waits = pipeline.run(
        [drafter],
        assembler(data, pinned=target_device != "cpu"),
        Span(0, NUM_BATCHES),
        life=Lifeline(),
        watchdog=Watchdog(60.0, None),
    )
    torch.cuda.synchronize()
    assert [number for number, _, _ in seen] == list(range(NUM_BATCHES))
    for number, tokens_T, features_TC in seen:
        batch = assemble(data.dataset, data.packing, number)
        expected = target.features(
            batch.tokens_T.to(target_device),
            batch.positions_T.to(target_device),
            batch.documents_T.to(target_device),
            cu_lengths=batch.cu_lengths,
        )
        assert tokens_T.cpu().equal(batch.tokens_T)
        assert features_TC.cpu().equal(expected.cpu())
    assert waits.elapsed_s > 0


def test_the_side_that_is_slow_on_the_device_is_named(place: Path, tmp_path: Path) -> None:
    """The threads run ahead; only the streams know."""
    config = tiny_config(place)
    target = Target.load(config.target.model, taps=(0, 2), device="cuda:0", dtype=torch.float32)
    data = read_data(config, target, tmp_path)
    real = target.features

    def slow(*arguments: object, **options: object) -> torch.Tensor:
        spin(40_000_000)
        return real(*arguments, **options)

    def drafter(pipeline: Pipeline, *, slow_step: bool) -> Callable[[Feed], None]:
        def body(feed: Feed) -> None:
            with torch.cuda.stream(pipeline.streams[0]):
                for _ in feed.batches(NUM_BATCHES, into=lambda _: None):
                    if slow_step:
                        spin(40_000_000)
            torch.cuda.synchronize()

        return body

    found = {}
    for slow_side, features in (("target", slow), ("drafter", real)):
        target.features = features
        pipeline = Pipeline(
            [target], [torch.device("cuda:0")], token_budget=128, features_dtype=torch.float32
        )
        found[slow_side] = pipeline.run(
            [drafter(pipeline, slow_step=slow_side == "drafter")],
            assembler(data, pinned=True),
            Span(0, NUM_BATCHES),
            life=Lifeline(),
            watchdog=Watchdog(60.0, None),
        )
    assert found["target"].drafter_for_features_s > 2 * found["target"].target_for_slot_s
    assert found["drafter"].target_for_slot_s > 2 * found["drafter"].drafter_for_features_s


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_run_goes_on_after_a_stop_and_allocates_nothing_once_warm(
    place: Path, tmp_path: Path, mode: str
) -> None:
    """Not bit for bit on a GPU: some kernels add with atomics. The loss is the same to 1e-3."""
    gpu = {"devices": ("cuda:0",)}
    config = tiny_config(place, target=gpu, drafter=gpu, execution={"mode": mode})
    allocs: list[int] = []
    losses: dict[str, list[float]] = {"whole": [], "parts": []}

    def show(name: str) -> Callable[[object], None]:
        def see(record: object) -> None:
            if getattr(record, "kind", "") == "step":
                losses[name].append(record.loss)  # type: ignore[attr-defined]
                allocs.append(record.device_allocs["cuda:0"])  # type: ignore[attr-defined]

        return see

    run(config, tmp_path / "whole", show=show("whole"))
    assert len(set(allocs)) == 1, "device allocations after the warm-up"
    run(config, tmp_path / "parts", max_steps=20, show=show("parts"))
    run(config, tmp_path / "parts", show=show("parts"))
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-3)
    assert events_of(tmp_path / "whole", "waits")


@two_gpus
@pytest.mark.parametrize(("num_targets", "accumulate_steps"), list(product([1, 2], [1, 2])))
def test_two_drafters_end_as_one_would(
    place: Path, tmp_path: Path, *, num_targets: int, accumulate_steps: int
) -> None:
    """Two drafters with a batches a step each, against one drafter with twice as many."""
    targets = ("cuda:0", "cuda:1")[:num_targets]
    for name, drafters in (("two", ("cuda:0", "cuda:1")), ("one", ("cuda:0",))):
        config = tiny_config(
            place,
            target={"devices": targets, "dtype": "fp32"},
            drafter={"devices": drafters},
            execution={"mode": "eager"},
            precision={"compute": "fp32"},
            optim={"max_steps": 10, "accumulate_steps": accumulate_steps * 2 // len(drafters)},
        )
        run(config, tmp_path / name)
    one, two = (checkpoint(tmp_path / name, 10) for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-3)
    assert_same_tensors({"step": one["state step"]}, {"step": two["state step"]})
