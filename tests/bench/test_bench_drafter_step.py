"""The drafter-step case on a CPU: the trainer's own steps, fed whole, as they come, or padded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import measured_apart, setting

from dflash.drafter.training import StepInputs
from dflash_bench.cases._case import Setting
from dflash_bench.cases.drafter_step import CASE, DrafterStep
from dflash_bench.drafters import LR, Drafters
from dflash_bench.lengths import batch_lengths, length_of_step
from dflash_bench.shapes import named_shape
from dflash_bench.steps import make_step
from dflash_bench.timing import steps_that_fit

TINY = Setting(shape=named_shape("tiny"), mode="eager", turn_steps=4)
VARIABLE = replace(TINY, lengths="variable")
CPU = torch.device("cpu")


def mean_loss(numbers: range, lengths: Iterator[int] | None = None) -> float:
    """Over steps made by hand from the step's own parts, on batches cut by hand."""
    step = make_step(TINY.shape, device=CPU)
    whole = StepInputs(*(tensor.clone() for tensor in step.batch))
    loss = weight = 0.0
    for number in numbers:
        if lengths is not None:
            length = next(lengths)
            step.batch = StepInputs(*(t[:length] if t.ndim else t.clone() for t in whole))
        step.batch.batch_number.fill_(number)
        step.parts["normal"]()
        loss += float(step.loss_sum)
        weight += float(step.weight_sum)
        step.set_lr(LR)
        step.parts["update"]()
    return loss / weight


@pytest.fixture(autouse=True)
def no_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def close(self) -> None:
            """A child's; it would outlive this test."""

    monkeypatch.setattr("dflash_bench.drafters.process_seal", Nothing)


def whole_life(setting: Setting, *, num_turns: int = 2) -> dict[str, Any]:
    subject = DrafterStep(setting)
    found = {**subject.build(), **subject.prepare()}
    found["first_steps_ms"] += subject.settle()
    found["turns"] = [subject.turn() for _ in range(num_turns)]
    found["bare"] = subject.bare()
    return {**found, **subject.finish()}


def test_a_life_tells_its_start_its_turns_and_its_loss() -> None:
    found = whole_life(TINY)
    assert len(found["first_steps_ms"]) == 8
    assert [len(turn) for turn in found["turns"]] == [4, 4]
    assert all(time_ms > 0 for turn in found["turns"] for time_ms in turn)
    assert found["bare"] > 0
    assert found["units"] == 256.0
    assert found["padded"] is False
    assert found["build_s"] > 0
    assert found["warm_up_s"] > 0
    assert found["graphs"].recompiles == 0
    assert found["more"]["metric ms"] > 0


def test_the_loss_is_the_mean_of_the_first_steps_by_hand() -> None:
    found = whole_life(TINY, num_turns=0)
    assert found["loss"] == pytest.approx(mean_loss(range(8)), rel=1e-6)
    assert found["loss_steps"] == 8
    few = whole_life(replace(TINY, settling_steps=4, turn_steps=2), num_turns=0)
    assert few["loss"] == pytest.approx(mean_loss(range(4)), rel=1e-6)
    assert few["loss_steps"] == len(few["first_steps_ms"]) == 4


def test_varying_lengths_are_fed_as_long_as_they_are_and_count_so() -> None:
    subject = DrafterStep(VARIABLE)
    found = {**subject.build(), **subject.prepare()}
    lengths = batch_lengths(256, on_gpu=False)
    subject.settle()
    fed: list[int] = []
    drafter = subject.drafters.first
    runner = drafter.runner
    drafter.runner = lambda part: (  # type: ignore[assignment]
        fed.append(drafter.step.batch.tokens_T.numel()) if part == "normal" else None,
        runner(part),
    )
    drafter.runner.stream = None  # type: ignore[attr-defined]
    subject.turn()
    timed = fed[2:]  # after the steps that lead in, which are the longest
    assert fed[:2] == [256, 256]
    assert timed == subject.so_far()["units"]
    assert sorted(timed) == sorted(2 * lengths)
    assert found["warm_up_s"] is None
    assert not runner.program.inputs  # none of them stays where it is
    fixed = Drafters(TINY).first
    assert set(fixed.runner.program.inputs) == {*fixed.step.batch._asdict()}


@pytest.mark.parametrize(("asked", "steps"), [(TINY, 2), (VARIABLE, 3)])
def test_turns_of_long_steps_are_short_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, *, asked: Setting, steps: int
) -> None:
    monkeypatch.setattr("dflash_bench.timing.TURN_S", 1e-6)
    found = whole_life(replace(asked, turn_steps=10_000), num_turns=1)
    assert [len(turn) for turn in found["turns"]] == [steps]


@pytest.mark.parametrize(
    ("step_s", "steps"), [(10.0, 2), (1.9, 2), (1.0, 4), (0.5, 8), (0.1, 10), (1e-6, 10)]
)
def test_a_turn_takes_about_four_seconds(step_s: float, steps: int) -> None:
    assert steps_that_fit(10, step_s) == steps
    assert steps_that_fit(1, step_s) == 1


@pytest.mark.parametrize("asked", [TINY, VARIABLE])
def test_any_seed_is_one(asked: Setting) -> None:
    found = whole_life(replace(asked, seed=2**63 - 1), num_turns=1)
    assert found["loss"] > 0


def test_padding_to_the_token_budget_changes_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    as_they_come = whole_life(VARIABLE, num_turns=0)
    monkeypatch.setattr("dflash_bench.drafters.PADDED", ("eager",))
    drafters = Drafters(VARIABLE)
    drafters.warm_up()
    assert not drafters.first.naive
    drafters.steps(as_they_come["loss_steps"])
    assert drafters.first.step.batch.tokens_T.numel() == 256
    assert drafters.loss() == pytest.approx(as_they_come["loss"], rel=1e-5)
    lengths = batch_lengths(256, on_gpu=False)
    steps = range(as_they_come["loss_steps"])
    by_hand = mean_loss(steps, (length_of_step(n, lengths, seed=0) for n in steps))
    assert as_they_come["loss"] == pytest.approx(by_hand, rel=1e-6)


def test_several_drafters_sum_their_gradients_and_count_all_tokens() -> None:
    drafters = Drafters(replace(TINY, devices=("cpu", "cpu")))
    drafters.warm_up()
    before = drafters.first.step.masters
    drafters.steps(3)
    one, other = (drafter.step.masters for drafter in drafters.all)
    assert one.keys() == before.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    batches = [drafter.step.batch.tokens_T for drafter in drafters.all]
    assert not torch.equal(*batches)
    assert drafters.units(range(2)) == [512.0, 512.0]


def test_a_drafter_that_dies_ends_the_others_and_is_what_is_told() -> None:
    drafters = Drafters(replace(TINY, devices=("cpu",) * 3))
    drafters.warm_up()

    def dies(_part: str) -> None:
        raise AssertionError("of the second thread")

    dies.stream = None  # type: ignore[attr-defined]
    drafters.all[1].runner = dies  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="of the second thread"):
        drafters.steps(2)


def test_modes_that_capture_are_told_to_need_a_gpu() -> None:
    for mode in ("reduce-overhead", "warmed", "graphed"):
        assert "captures CUDA graphs" in CASE.why_not(replace(TINY, mode=mode))
    assert CASE.why_not(TINY) == ""
    assert "8-bit" in CASE.why_not(replace(TINY, matmul="fp8"))


def test_reduce_overhead_is_measured_where_it_is_known_to_die_and_warmed_is_not() -> None:
    gpus = replace(TINY, devices=("cuda:0",) * 3)
    assert CASE.why_not(replace(gpus, mode="reduce-overhead")) == ""
    assert "cudagraph trees" in CASE.why_not(replace(gpus, mode="warmed"))
    assert CASE.why_not(replace(gpus, mode="graphed")) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_of_varying_lengths_are_captured_once_though_fixed_ones_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.12 the compile cache, which both share, confuses their inputs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    shape = named_shape("smollm2", ["token_budget=1024", "num_documents=4"])
    for lengths in ("fixed", "variable"):
        asked = setting("reduce-overhead", shape=shape, lengths=lengths, devices=("cuda:0",))
        child = measured_apart("drafter-step", asked)
        assert child.failure is None, child.failure.trace
        assert child.facts["graphs"].captured_late > 0
        assert child.facts["unsettled"] == ""
