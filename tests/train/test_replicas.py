"""Several drafters train one model: the sum of their gradients moves all of them alike."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import batch, make_step
from tiny_runs import checkpoint, run, steps_of, tiny_config

from dflash.errors import MissingError
from dflash.execution import Runner
from dflash.pipeline.assembly import Pipeline, Watchdog
from dflash.pipeline.feed import Feed
from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.pipeline.slots import BatchFacts
from dflash.pipeline.workers import Span
from dflash.target.shape import default_shape
from dflash.train import replicas
from dflash.train.agreement import Agreement
from dflash.train.build import assembler, load_targets, make_steps, read_data
from dflash.train.devices import SumChoice, settle_devices
from dflash.train.loop import Drafting, train_loop
from dflash.train.replicas import GradientSum, Rendezvous
from dflash.train.schedule import Cosine
from dflash.train.step import TrainStep
from dflash.train.totals import averages

CPU = torch.device("cpu")
FIXED_ORDER = SumChoice("fixed_order", "a test")
SCHEDULE = Cosine(peak=1e-2, floor=0.0, warmup_steps=1, num_steps=8)


def in_threads(count: int, body: Callable[[int], None]) -> None:
    """Run *body* of every replica in a thread of its own; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(replica: int) -> None:
        try:
            body(replica)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("parties", [1, 2, 5])
def test_nobody_leaves_a_meeting_before_all_have_come(parties: int) -> None:
    meeting, life = Rendezvous(parties), Lifeline()
    arrived: list[int] = []

    def body(_replica: int) -> None:
        for number in range(50):
            arrived.append(number)
            meeting.meet(life)
            assert arrived.count(number) == parties

    in_threads(parties, body)


def test_a_meeting_that_lacks_somebody_ends_when_the_run_does() -> None:
    meeting, life = Rendezvous(2), Lifeline()
    threading.Timer(0.05, life.halt).start()
    with pytest.raises(Halted):
        meeting.meet(life)


def facts(number: int) -> BatchFacts:
    return BatchFacts(
        number=number, num_real_tokens=7, num_supervised_tokens=5, num_documents=1, rows=(number,)
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_every_replica_holds_the_very_same_sum_and_learns_of_every_batch(num_replicas: int) -> None:
    steps = [make_step(batch(seed)) for seed in range(num_replicas)]
    for step in steps:
        step.parts["metric"]()
    alone = [
        [*[p.grad.double() for p in step.parameters], step.totals.step_sums.clone()]
        for step in steps
    ]
    summing = GradientSum(steps, FIXED_ORDER, streams=[None] * num_replicas)
    heard: dict[int, list[int]] = {}

    def body(replica: int) -> None:
        batches = summing(replica, [facts(replica), facts(replica + num_replicas)], Lifeline())
        heard[replica] = [one.number for one in batches]

    in_threads(num_replicas, body)
    for position, parts in enumerate(zip(*alone, strict=True)):
        sums = [
            [*[p.grad for p in step.parameters], step.totals.step_sums][position] for step in steps
        ]
        assert all(torch.equal(one, sums[0]) for one in sums)
        expected = torch.stack(parts).sum(0)
        torch.testing.assert_close(sums[0].double(), expected, rtol=1e-6, atol=1e-5)
    assert heard == {n: list(range(2 * num_replicas)) for n in range(num_replicas)}


class FakeNccl:
    """NCCL's sum on CPU tensors; notes who calls with what, and calls that overlap."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.seen: list[list[torch.Tensor]] = []
        self.streams: list[object] = []
        self.busy = threading.Lock()
        self.overlapped = False

    def all_reduce(self, copies: list[torch.Tensor], *, streams: object) -> None:
        if not self.busy.acquire(blocking=False):
            self.overlapped = True
            return
        time.sleep(1e-4)  # so that an overlap shows
        total = torch.stack(list(copies)).sum(0)
        for copy in copies:
            copy.copy_(total)
        self.threads.append(threading.current_thread().name)
        self.seen.append(list(copies))
        self.streams.append(streams)
        self.busy.release()


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(replicas, "nccl", fake)
    return fake


def test_nccl_sums_every_tensor_in_place_from_one_thread_at_a_time(fake_nccl: FakeNccl) -> None:
    streams: list[Any] = [object(), object(), object()]
    steps = [make_step(batch(seed)) for seed in range(3)]
    summing = GradientSum(steps, SumChoice("nccl", "a test"), streams=streams)
    heard: dict[tuple[int, int], list[int]] = {}
    expected: dict[int, list[torch.Tensor]] = {}

    def body(replica: int) -> None:
        step = steps[replica]
        for turn in range(5):
            step.parts["normal"]()
            places = [g.data_ptr() for g in step.gradients()]
            expected.setdefault(turn, []).append(torch.cat([g.flatten() for g in step.gradients()]))
            batches = summing(replica, [facts(3 * turn + replica)], Lifeline())
            heard[replica, turn] = [one.number for one in batches]
            assert [g.data_ptr() for g in step.gradients()] == places
            summed = torch.cat([g.flatten() for g in step.gradients()])
            # nobody comes here before all three have been added
            torch.testing.assert_close(summed, sum(expected[turn]), rtol=1e-4, atol=1e-4)
            step.parts["update"]()

    in_threads(3, body)
    per_turn = len(steps[0].parameters) + 1
    assert len(fake_nccl.seen) == 5 * per_turn
    assert not fake_nccl.overlapped
    for turn in range(5):
        assert len(set(fake_nccl.threads[turn * per_turn : (turn + 1) * per_turn])) == 1
    assert all(given is streams for given in fake_nccl.streams)
    assert heard == {(n, t): [3 * t, 3 * t + 1, 3 * t + 2] for n in range(3) for t in range(5)}
    for one in steps[1:]:
        assert_equal(steps[0], one)


def test_a_failing_sum_frees_the_others_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, life, halted = [make_step(batch(seed)) for seed in range(2)], Lifeline(), []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL Error 1: unhandled cuda error")

    monkeypatch.setattr(replicas.nccl, "all_reduce", fail)
    summing = GradientSum(steps, SumChoice("nccl", "a test"), streams=[None, None])

    def body(replica: int) -> None:
        steps[replica].parts["normal"]()
        try:
            summing(replica, [facts(replica)], life)
        except RuntimeError as error:
            life.fail(f"drafter-{replica}", error)
        except Halted:
            halted.append(replica)

    in_threads(2, body)
    assert len(halted) == 1
    assert life.failure is not None
    assert "NCCL Error 1" in str(life.failure[1])


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_where_nccl_fails_the_fixed_order_takes_over_and_says_why(
    monkeypatch: pytest.MonkeyPatch, *, is_asked_for: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL Error 1: unhandled cuda error")

    monkeypatch.setattr(replicas.nccl, "all_reduce", fail)
    steps = [make_step(batch(seed)) for seed in range(2)]
    choice = SumChoice("nccl", "a test", is_asked_for=is_asked_for)
    summing = GradientSum(steps, choice, streams=[None, None])
    if is_asked_for:
        with pytest.raises(MissingError, match="cannot sum here: NCCL Error 1"):
            summing.warm_up()
        return
    summing.warm_up()
    assert summing.choice.kind == "fixed_order"
    assert "NCCL was tried and cannot sum here: NCCL Error 1" in summing.choice.why

    def body(replica: int) -> None:
        steps[replica].parts["normal"]()
        summing(replica, [facts(replica)], Lifeline())

    in_threads(2, body)
    gradients = [torch.cat([g.flatten() for g in step.gradients()]) for step in steps]
    assert gradients[0].equal(gradients[1])


def test_warming_up_sums_every_size_that_will_come(
    fake_nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    steps = [make_step(batch(seed)) for seed in range(2)]
    before = [p.clone() for step in steps for p in step.parameters]
    GradientSum(steps, SumChoice("nccl", "a test"), streams=[None, None]).warm_up()
    steps[0].parts["normal"]()
    coming = {(g.numel(), g.dtype) for g in (*steps[0].gradients(), steps[0].totals.step_sums)}
    assert coming <= {(copies[0].numel(), copies[0].dtype) for copies in fake_nccl.seen}
    assert set(fake_nccl.threads) == {threading.main_thread().name}
    after = [p for step in steps for p in step.parameters]
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


def test_one_drafter_has_nobody_to_sum_with() -> None:
    step = make_step(batch(0))
    step.parts["normal"]()
    before = [p.grad.clone() for p in step.parameters]
    summing = GradientSum([step], SumChoice("none", "a test"), streams=[None])
    assert summing(0, [facts(4)], Lifeline()) == [facts(4)]
    assert all(torch.equal(p.grad, g) for p, g in zip(step.parameters, before, strict=True))


def trained(place: Path, data: Path, sizes: tuple[int, int]) -> list[TrainStep]:
    """Four steps of six batches through the real pipeline; return the replicas' steps.

    *sizes* are targets and drafters, all on the CPU; the configuration refuses to name a target's
    device twice, so the lists are made here. After every step the replicas are compared.
    """
    accumulate_steps = 6 // sizes[1]
    config = tiny_config(place, optim={"accumulate_steps": accumulate_steps})
    settled = settle_devices(config)
    targets = load_targets(config, settled) * sizes[0]
    devices = replace(settled, targets=("cpu",) * sizes[0], drafters=("cpu",) * sizes[1])
    pipeline = Pipeline(targets, [CPU] * sizes[1], token_budget=128, features_dtype=torch.float32)
    shape = default_shape(targets[0], config.drafter)
    steps = make_steps(config, devices, shape, targets=targets)
    summing = GradientSum(steps, FIXED_ORDER, streams=[None] * sizes[1])
    agreement = Agreement(steps, every_steps=1, last_step=4)
    meeting = Rendezvous(sizes[1])

    def drafter(replica: int) -> Callable[[Feed], None]:
        drafting = Drafting(
            replica=replica,
            step=steps[replica],
            runner=Runner(steps[replica], "eager"),
            gradient_sum=summing,
            agreement=agreement,
            schedule=SCHEDULE,
            wants_metrics=lambda _: True,
            boundary=None,
            stream=None,
        )

        def body(feed: Feed) -> None:
            for n in range(4):
                span = {"first_step": n, "end_step": n + 1}
                train_loop(drafting, **span, accumulate_steps=accumulate_steps)(feed)
                meeting.meet(feed.life)
                assert_equal(steps[0], steps[replica])
                meeting.meet(feed.life)

        return body

    pipeline.run(
        [drafter(replica) for replica in range(sizes[1])],
        assembler(read_data(config, targets[0], data), pinned=False),
        Span(0, 24),
        life=Lifeline(),
        watchdog=Watchdog(60.0, None),
    )
    return steps


def assert_equal(one: TrainStep, other: TrainStep) -> None:
    mine, theirs = {**one.masters, **one.moments()}, {**other.masters, **other.moments()}
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert torch.equal(one.totals.sums, other.totals.sums)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)], ids=str)
def test_replicas_stay_bit_equal_and_train_what_one_drafter_would(
    place: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """N drafters with 6 / N batches a step each, against one drafter with all six."""
    (alone,) = trained(place, tmp_path, (1, 1))
    first = trained(place, tmp_path, sizes)[0]
    for name, weight in alone.masters.items():
        # the same float32 gradients added in another order; Adam shows it where they are tiny
        torch.testing.assert_close(first.masters[name], weight, rtol=0, atol=1e-4)
    one, many = averages(alone.totals.sums), averages(first.totals.sums)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.parametrize("execution", [{}, {"activation_checkpointing": True}], ids=str)
def test_two_drafters_are_one_with_twice_the_batch(
    place: Path, tmp_path: Path, execution: dict[str, bool]
) -> None:
    """Whole runs: the batches of a step are the same, so are their anchors, which follow from the
    batch's number; only the order in which float32 gradients are added differs."""
    for name, drafters in (("one", ("cpu",)), ("two", ("cpu", "cpu"))):
        optim = {"max_steps": 12, "accumulate_steps": 2 // len(drafters)}
        config = tiny_config(
            place,
            drafter={"devices": drafters},
            optim=optim,
            execution={"check_replicas_every": 1, **execution},
        )
        run(config, tmp_path / name)
    one, two = (checkpoint(tmp_path / name, 12) for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    records = [steps_of(tmp_path / name) for name in ("one", "two")]
    for alone, both in zip(*records, strict=True):
        assert both["tokens"] == alone["tokens"]
        assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
