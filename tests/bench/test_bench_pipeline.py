"""The pipeline as a case, in miniature on a CPU: orders, both sides, who waited, what dies."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import TINY, measured, measured_apart, setting
from tiny_runs import write_texts
from torch import Tensor

from dflash.errors import DeviceMemoryError, WorkerDiedError
from dflash.execution import Runner
from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.pipeline.slots import BatchFacts
from dflash.pipeline.waiting import Waits
from dflash_bench.cases import all_cases
from dflash_bench.cases.pipeline import LEAD_IN_STEPS, PipelineSteps
from dflash_bench.orders import Order, OrderedFeed, Orders, Taken
from dflash_bench.pipeline_figures import run_config
from dflash_bench.random_target import random_target, write_definitions
from dflash_bench.slugs import slug_of
from dflash_bench.subjects import failure_of


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("pipeline") / "texts")


@pytest.fixture(scope="module")
def found(texts: Path) -> tuple[list[float], dict[str, Any]]:
    return measured("pipeline", setting("eager", data=(str(texts),), turn_steps=4), num_turns=3)


def test_both_sides_and_the_pipeline_are_told(found: tuple[list[float], dict[str, Any]]) -> None:
    times_ms, facts = found
    more, details = facts["more"], facts["more"]["details"]
    assert len(times_ms) == 3 * 4
    assert details["target"]["steps"] == details["drafter"]["steps"] == 2 * 4
    assert details["pipeline"]["steps"] == 12
    assert details["pipeline"]["step_ms"] == pytest.approx(sum(times_ms) / 12)
    slower = max(details["target"]["step_ms"], details["drafter"]["step_ms"])
    assert more["of it alone"] == pytest.approx(slower / details["pipeline"]["step_ms"])
    assert details[more["slower side"]]["step_ms"] == slower
    assert more["tok/s a device"] == details["pipeline"]["tokens_per_s"]
    assert details["num_devices"] == 1


def test_real_documents_of_many_lengths_are_packed_and_real_tokens_counted(
    found: tuple[list[float], dict[str, Any]],
) -> None:
    times_ms, facts = found
    details = facts["more"]["details"]
    assert details["documents_per_batch"] > 1
    assert 0.5 < details["fill"] <= 1
    assert len(facts["units"]) == len(times_ms)
    assert all(0 < tokens <= TINY.token_budget for tokens in facts["units"])
    rate = sum(facts["units"]) / sum(times_ms) * 1e3
    assert details["pipeline"]["tokens_per_s"] == pytest.approx(rate)


def test_who_waited_is_told_of_the_timed_steps_alone(
    found: tuple[list[float], dict[str, Any]],
) -> None:
    times_ms, facts = found
    waits = facts["more"]["details"]["waits"]
    # The lead-in of every turn is left out, or this would be more than twice as long.
    assert waits["elapsed_s"] == pytest.approx(sum(times_ms) / 1e3, rel=0.2)
    assert 0 <= waits["drafter_for_features_s"] <= waits["elapsed_s"]
    assert facts["more"]["details"]["advice"]


def test_the_loss_is_of_the_same_steps_however_many_turns_follow(
    found: tuple[list[float], dict[str, Any]], texts: Path
) -> None:
    _, again = measured("pipeline", setting("eager", data=(str(texts),)), num_turns=1)
    assert again["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert again["loss_steps"] == 5
    assert len(again["first_steps_ms"]) == 5


def test_no_thread_is_left(found: tuple[list[float], dict[str, Any]]) -> None:
    assert found
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"pipeline", "loader", "target-0", "drafter-0"}


def test_what_ends_the_pipeline_is_raised_by_the_turn(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = PipelineSteps(setting("eager", data=(str(texts),)))
    subject.build()
    subject.prepare()

    def broken(_runner: Runner, _part: str) -> None:
        raise ValueError("a kernel that does not exist")

    monkeypatch.setattr(Runner, "__call__", broken)
    with pytest.raises(WorkerDiedError, match="drafter-0 died of ValueError: a kernel"):
        subject.turn()


def test_a_worker_that_runs_out_of_memory_says_where_and_why(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = PipelineSteps(setting("eager", data=(str(texts),)))
    subject.build()
    subject.prepare()

    def full(_runner: Runner, _part: str) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory 40.00 GiB is"
            " allocated by PyTorch, and 90.00 GiB is reserved by PyTorch but unallocated."
        )

    monkeypatch.setattr(Runner, "__call__", full)
    with pytest.raises(DeviceMemoryError, match="drafter-0 ran out of device memory") as caught:
        subject.turn()
    failure = failure_of(caught.value, "turn", known={})
    assert failure.out_of_memory
    assert "in full\n" in failure.trace
    assert "before its order" not in failure.trace
    assert slug_of(failure) == "allocator-churn"


def test_several_drafters_are_refused_in_a_sentence() -> None:
    assert "one drafter" in all_cases()["pipeline"].why_not(setting("eager", devices=("cpu",) * 2))


class FakeFeed:
    """Batches of 10, 11, 12, ... real tokens; every batch waited a second."""

    def __init__(self) -> None:
        self.life = Lifeline()
        self.given: list[int] = []

    def waits(self) -> Waits:
        return Waits(float(len(self.given)), 0.0, float(len(self.given)), 0.0)

    def batches(
        self, count: int, *, into: Callable[[Mapping[str, Tensor]], None]
    ) -> Iterator[BatchFacts]:
        for _ in range(count):
            into({})
            self.given.append(10 + len(self.given))
            yield BatchFacts(0, self.given[-1], 0, 1, ())


class FakeSlot:
    facts = BatchFacts(0, 7, 0, 1, ())

    class inputs:  # noqa: N801 - a tensor's worth of nothing
        @staticmethod
        def _asdict() -> dict[str, Tensor]:
            return {}


@pytest.fixture
def working() -> Iterator[tuple[FakeFeed, Orders, threading.Thread]]:
    real, orders = FakeFeed(), Orders(on_gpu=False)
    feed: Any = OrderedFeed(real, FakeSlot(), orders)  # type: ignore[arg-type]

    def loop() -> None:
        try:
            while True:
                for facts in feed.batches(1, into=lambda _: None):
                    orders(0, [facts], feed)
        except Halted:
            return

    thread = threading.Thread(target=loop)
    thread.start()
    yield real, orders, thread
    real.life.halt()
    thread.join()


Working = tuple[FakeFeed, Orders, threading.Thread]


def test_a_lead_in_is_neither_timed_nor_counted(working: Working) -> None:
    _, orders, thread = working
    taken = orders.do(Order("pipeline", 2, 3), thread)
    assert taken.tokens == [12, 13, 14]
    assert len(taken.times_ms) == 3
    assert (taken.waits.elapsed_s, taken.waits.drafter_for_features_s) == (3.0, 3.0)


def test_the_drafter_alone_takes_no_batch_and_the_target_alone_gives_all(working: Working) -> None:
    real, orders, thread = working
    assert orders.do(Order("drafter", 1, 4), thread).tokens == [7, 7, 7, 7]
    assert real.given == []
    assert orders.do(Order("target", 1, 2), thread).tokens == [11, 12]
    assert orders.do(Order("pipeline", 0, 1), thread).tokens == [13]
    assert len(real.given) == 4


def test_orders_add_up() -> None:
    one = Taken(times_ms=[10.0], tokens=[100], waits=Waits(1.0, 0.1, 0.2, 0.3))
    both = one.and_(Taken(times_ms=[30.0], tokens=[300], waits=Waits(2.0, 0.1, 0.2, 0.3)))
    assert (both.step_ms, both.tokens_per_s) == (20.0, 10_000.0)
    assert both.waits.elapsed_s == 3.0


def test_an_order_to_a_pipeline_that_has_ended_is_an_error(working: Working) -> None:
    real, orders, thread = working
    real.life.halt()
    thread.join()
    with pytest.raises(RuntimeError, match="has ended"):
        orders.do(Order("pipeline", 0, 1), thread)


@pytest.mark.parametrize("num_anchors", [16, 32, 48])
def test_the_run_has_the_shapes_anchors_and_documents(num_anchors: int) -> None:
    from dflash.drafter.masks import num_anchors_for

    asked = setting("eager", shape=TINY.with_(num_anchors=num_anchors))
    config = run_config(asked, Path("text.jsonl"))
    density, size = config.data.anchor_density, config.drafter.block_size
    assert num_anchors_for(config.data.token_budget, density, size) == num_anchors
    assert config.data.max_document_tokens == 128
    assert config.data.train == ("text.jsonl",)
    assert config.execution.mode == "eager"


def test_a_random_target_has_the_shape_that_its_drafter_needs() -> None:
    targets = [
        random_target(TINY, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert targets[0].num_layers == TINY.drafter.num_target_layers
    assert targets[0].embedding_VD.shape == (TINY.drafter.vocab_size, TINY.drafter.hidden_size)
    assert targets[0].taps == TINY.drafter.target_layer_ids
    assert targets[0].fingerprint == targets[1].fingerprint != targets[2].fingerprint


def test_the_text_is_the_standard_library_in_pieces_of_many_lengths_or_in_long_ones(
    tmp_path: Path,
) -> None:
    def lengths(*, joined: bool) -> list[int]:
        file = write_definitions(tmp_path / f"{joined}.jsonl", joined=joined)
        return [len(json.loads(line)["text"]) for line in file.read_text().splitlines()]

    apart, long = lengths(joined=False), lengths(joined=True)
    assert len(apart) > 1000
    assert len(set(apart)) > 500
    assert min(long) >= 1_000_000
    assert 0 <= sum(apart) - sum(long) + len(apart) < 1_100_000  # what is left over is left out


def test_a_turn_begins_after_the_slots_have_been_filled() -> None:
    assert LEAD_IN_STEPS > 1 + 1  # a feature slot, and the batch that the target has under way


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", all_cases()["pipeline"].modes)
def test_the_pipeline_is_measured_on_a_gpu(mode: str, texts: Path) -> None:
    asked = setting(mode, devices=("cuda:0",), target_device="cuda:0", data=(str(texts),))
    child = measured_apart("pipeline", asked)
    assert child.failure is None
    details = child.facts["more"]["details"]
    assert details["waits"]["elapsed_s"] > 0
    assert child.facts["memory"].peak_allocated_gib > 0
    if mode in ("warmed", "graphed"):
        assert child.facts["graphs"].captured_late == 0
        assert set(details["device_allocs"]) == {"cuda:0"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_devices_share_the_work() -> None:
    asked = setting("graphed", devices=("cuda:1",), target_device="cuda:0", lengths="variable")
    child = measured_apart("pipeline", asked)
    assert child.failure is None
    assert child.facts["more"]["details"]["num_devices"] == 2
    assert set(child.facts["more"]["details"]["allocated_gib"]) == {"cuda:0", "cuda:1"}
