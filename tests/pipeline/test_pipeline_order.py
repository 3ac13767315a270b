"""Any number of targets feeds any number of drafters, each in order, and nobody waits forever."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_config

from dflash.config import RunConfig
from dflash.data.batch import PackedBatch, assemble
from dflash.errors import DataError
from dflash.pipeline.assembly import Pipeline, Watchdog
from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.workers import Span
from dflash.target.model import Target
from dflash.train.build import Data, assembler, read_data
from dflash.train.replicas import Rendezvous

CPU = torch.device("cpu")
WATCHDOG = Watchdog(60.0, None)
SIZES = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3)]  # targets, drafters
LAYOUTS = list(product(SIZES, [1, 2], [0, 5]))  # with accumulate_steps, first step


@pytest.fixture(scope="module")
def config(place: Path) -> RunConfig:
    return tiny_config(place)


@pytest.fixture(scope="module")
def target(config: RunConfig) -> Target:
    return Target.load(config.target.model, taps=(0, 2), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def data(config: RunConfig, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return read_data(config, target, tmp_path_factory.mktemp("data"))


def copy_to(place: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """What a step does with a slot, which is no longer its own afterwards."""
    place.update({name: tensor.clone() for name, tensor in tensors.items()})


def nowhere(_tensors: Mapping[str, torch.Tensor]) -> None:
    pass


def pipeline_of(target: Target, num_targets: int, num_drafters: int) -> Pipeline:
    return Pipeline(
        [target] * num_targets,
        [CPU] * num_drafters,
        token_budget=128,
        features_dtype=torch.float32,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batch_b_goes_to_drafter_b_mod_n_in_order_with_its_own_features(
    target: Target, data: Data, layout: tuple[tuple[int, int], int, int]
) -> None:
    sizes, accumulate_steps, first_step = layout
    num_drafters = sizes[1]
    pipeline = pipeline_of(target, *sizes)
    num_steps, per_step = 6, accumulate_steps * num_drafters
    meeting = Rendezvous(num_drafters)
    seen: list[list[int]] = [[] for _ in range(num_drafters)]
    wrong: list[int] = []

    def drafter(index: int) -> Callable[[Feed], None]:
        def body(feed: Feed) -> None:
            for _ in range(num_steps):
                given: dict[str, torch.Tensor] = {}
                for facts in feed.batches(accumulate_steps, into=partial(copy_to, given)):
                    batch = assemble(data.dataset, data.packing, facts.number)
                    if not as_alone(target, batch).equal(given["features_TC"]):
                        wrong.append(facts.number)
                    if int(given["batch_number"]) != facts.number or facts.rows != tuple(
                        batch.rows
                    ):
                        wrong.append(facts.number)
                    seen[index].append(facts.number)
                meeting.meet(feed.life)

        return body

    span = Span(first_step * per_step, (first_step + num_steps) * per_step)
    pipeline.run(
        [drafter(index) for index in range(num_drafters)],
        assembler(data, pinned=False),
        span,
        life=Lifeline(),
        watchdog=WATCHDOG,
    )
    for index in range(num_drafters):
        expected = [b for b in range(span.first, span.end) if b % num_drafters == index]
        assert seen[index] == expected
    assert wrong == []


def as_alone(target: Target, batch: PackedBatch) -> torch.Tensor:
    """The batch through the target in this thread."""
    with target.lock:
        return target.features(
            batch.tokens_T, batch.positions_T, batch.documents_T, cu_lengths=batch.cu_lengths
        )


def test_priming_leaves_the_batch_in_the_first_slot_of_every_drafter(
    target: Target, data: Data
) -> None:
    pipeline = pipeline_of(target, 2, 2)
    pipeline.prime(assembler(data, pinned=False), 3)
    batch = assemble(data.dataset, data.packing, 3)
    for slots in pipeline.slots:
        assert slots[0].inputs.features_TC.equal(as_alone(target, batch))
        assert slots[0].inputs.tokens_T.equal(batch.tokens_T)
        assert int(slots[0].inputs.batch_number) == 3


def test_a_run_allocates_its_host_buffers_once(target: Target, data: Data) -> None:
    buffers: set[int] = set()
    inner = assembler(data, pinned=False)

    def counting(number: int, out: PackedBatch | None) -> PackedBatch:
        batch = inner(number, out)
        buffers.add(batch.tokens_T.data_ptr())
        return batch

    def drafter(feed: Feed) -> None:
        assert [facts.number for facts in feed.batches(20, into=nowhere)] == list(range(20))

    pipeline = pipeline_of(target, 1, 1)
    pipeline.run([drafter], counting, Span(0, 20), life=Lifeline(), watchdog=WATCHDOG)
    assert len(buffers) <= 3


def test_a_drafter_that_returns_early_ends_everybody(target: Target, data: Data) -> None:
    pipeline, after = pipeline_of(target, 2, 2), threading.Event()

    def first(feed: Feed) -> None:
        for _ in feed.batches(1, into=nowhere):
            pass

    def second(feed: Feed) -> None:
        try:
            for _ in feed.batches(1000, into=nowhere):
                pass
        finally:
            after.set()

    pipeline.run(
        [first, second],
        assembler(data, pinned=False),
        Span(0, 2000),
        life=Lifeline(),
        watchdog=WATCHDOG,
    )
    assert after.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith(("loader", "target-"))]


def test_waits_are_counted_on_both_sides(target: Target, data: Data) -> None:
    pipeline = pipeline_of(target, 1, 1)

    def slow(feed: Feed) -> None:
        before = feed.waits()
        for _ in feed.batches(6, into=nowhere):
            threading.Event().wait(0.05)
        assert feed.waits().target_for_slot_s > before.target_for_slot_s

    waits = pipeline.run(
        [slow], assembler(data, pinned=False), Span(0, 6), life=Lifeline(), watchdog=WATCHDOG
    )
    assert waits.elapsed_s >= 0.3
    assert waits.target_for_slot_s > waits.drafter_for_features_s
    assert "share cpu" in waits.suggestion(["cpu"], ["cpu"])


def test_a_pause_is_in_no_figure_of_the_waits(target: Target, data: Data) -> None:
    pipeline, life = pipeline_of(target, 1, 1), Lifeline()

    def pausing(feed: Feed) -> None:
        for _ in feed.batches(6, into=nowhere):
            with life.paused():
                threading.Event().wait(0.2)

    started = time.perf_counter()
    waits = pipeline.run(
        [pausing], assembler(data, pinned=False), Span(0, 6), life=life, watchdog=WATCHDOG
    )
    steps_s = time.perf_counter() - started - 6 * 0.2
    assert 0 < waits.elapsed_s <= steps_s
    assert waits.target_for_slot_s <= steps_s


def test_an_error_of_the_loader_keeps_its_kind(target: Target) -> None:
    def broken(_number: int, _out: PackedBatch | None) -> PackedBatch:
        raise DataError("a shard is gone")

    def drafter(feed: Feed) -> None:
        for _ in feed.batches(1, into=nowhere):
            pass

    with pytest.raises(DataError, match="a shard is gone") as caught:
        pipeline_of(target, 1, 1).run(
            [drafter], broken, Span(0, 4), life=Lifeline(), watchdog=WATCHDOG
        )
    assert caught.value.exit_code == 12
