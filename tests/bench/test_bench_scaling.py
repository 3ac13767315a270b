"""Cost curves from rows whose times are made up by a law, and what bad values are told."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash.environment import Environment
from dflash.errors import UsageError
from dflash.measurement import Bench, Memory, Row, Spread
from dflash.nvml import Gpu
from dflash_bench import scaling
from dflash_bench.scaling import run_scaling
from dflash_bench.session import BenchPlan
from dflash_bench.shapes import BenchShape, named_shape
from dflash_bench.swept import Over, swept_shape
from dflash_bench.weather import Watch

TINY = named_shape("tiny")
LARGE = named_shape("qwen3-8b-3072")
H200 = Gpu(index=0, name="H200", memory_gib=139.8, used_gib=0.0, compute_capability="9.0")
MODES = ("eager", "graphed")


def bench_of(rows: list[Row], **changes: Any) -> Bench:  # noqa: ANN401
    here = Environment(
        dflash="0", python="3", platform="p", cpu_cores=1, memory_gib=1.0, packages={}, gpus=[H200]
    )
    values = {"command": "dflash bench scaling", "date": "", "environment": here, "device": "H200"}
    return Bench(**{**values, "rows": rows, **changes})


def row_of(shape: BenchShape, mode: str, *, step_ms: float | None) -> Row:
    if step_ms is None:
        why = "it cannot fit"
        return Row(case="drafter-step", shape=shape.name, mode=mode, state="skipped", why=why)
    spread = Spread(median=step_ms, p10=step_ms, p90=step_ms, max=step_ms, count=10)
    return Row(
        case="drafter-step",
        shape=shape.name,
        mode=mode,
        state="measured",
        step_ms=spread,
        memory=Memory(peak_allocated_gib=step_ms / 10),
    )


Law = Callable[[BenchPlan, BenchShape, str], float | None]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> tuple[list[BenchPlan], list[Law]]:
    """The plans that were run, and (last) the law of the times."""
    seen: list[BenchPlan] = []
    laws: list[Law] = []

    def run_bench(*asked: BenchPlan, say: Callable[[str], None]) -> Bench:
        say("measuring")
        seen.extend(asked)
        rows = [
            row_of(shape, mode, step_ms=laws[-1](plan, shape, mode))
            for plan in asked
            for shape in plan.shapes
            for mode in MODES
        ]
        shapes = {shape.name: shape.record() for plan in asked for shape in plan.shapes}
        return bench_of(rows, shapes=shapes)

    monkeypatch.setattr(scaling, "run_bench", run_bench)
    monkeypatch.setattr(scaling, "settled_devices", lambda plan: ("cuda:0",) * plan.drafters)
    return seen, laws


def sweep(shape: BenchShape, over: Over, values: list[int]) -> Bench:
    return run_scaling(BenchPlan(shapes=(shape,)), over, values, say=lambda _: None)


def test_the_exponent_of_a_power_law_is_found_for_every_mode(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(
        lambda _, shape, mode: shape.token_budget ** (1.5 if mode == "eager" else 1.0) / 100
    )
    values = [8192, 16384, 32768, 49152]
    found = sweep(LARGE, "token_budget", values)
    assert len(plans[0]) == 1
    assert [curve.exponent and round(curve.exponent.value, 6) for curve in found.scaling] == [
        1.5,
        1.0,
    ]
    eager = found.scaling[0]
    assert eager.over == "token_budget"
    assert eager.values == values
    assert eager.step_ms == [pytest.approx(value**1.5 / 100) for value in values]
    assert eager.peak_gib == [pytest.approx(value**1.5 / 1000) for value in values]
    names = {row.name for row in found.rows}
    assert set(eager.rows) <= names
    assert found.options["values"] == values


def test_a_token_budget_keeps_the_density_of_anchors_and_the_length_of_documents() -> None:
    packed = named_shape("packed-24k")
    for value in (8192, 12288, 49152):
        shape = swept_shape(packed, "token_budget", value)
        assert shape.num_anchors / value == pytest.approx(1 / 6, rel=0.01)
        assert shape.num_documents == value // 3072 or value == 8192
        assert shape.name == f"packed-24k:token_budget={value}"
    assert swept_shape(packed, "token_budget", 24576).num_anchors == packed.num_anchors
    assert swept_shape(packed, "num_anchors", 800) == packed.with_(
        name="packed-24k:num_anchors=800", num_anchors=800
    )
    documents = swept_shape(packed, "num_documents", 64)
    assert (documents.num_documents, documents.token_budget) == (64, 24576)


def test_the_plan_stands_beside_the_peak_and_says_where_the_wall_is(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(lambda _, shape, __: float(shape.token_budget))
    found = sweep(LARGE, "token_budget", [8192, 16384, 24576])
    eager, graphed = found.scaling
    assert all(planned is not None and planned > 0 for planned in eager.planned_gib)
    assert sorted(eager.planned_gib) == eager.planned_gib
    # Compiled layers keep less for their backward pass.
    assert eager.wall is not None
    assert graphed.wall is not None
    assert eager.wall < graphed.wall
    one = sweep(LARGE, "token_budget", [int(eager.wall) - 128, int(eager.wall), 2**16]).scaling[0]
    below, at, _ = one.planned_gib
    assert below is not None
    assert at is not None
    assert below + 1 <= H200.memory_gib < at + 1


def test_what_did_not_fit_has_no_time_but_its_row_and_its_plan(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(
        lambda _, shape, __: None if shape.token_budget > 40_000 else float(shape.token_budget)
    )
    eager = sweep(LARGE, "token_budget", [8192, 16384, 24576, 49152]).scaling[0]
    assert eager.step_ms == [8192.0, 16384.0, 24576.0, None]
    assert eager.peak_gib[-1] is None
    assert eager.planned_gib[-1] is not None
    assert eager.rows[-1].startswith("drafter-step qwen3-8b-3072:token_budget=49152")
    assert eager.exponent is not None
    assert eager.exponent.value == pytest.approx(1.0)


def test_two_points_have_no_exponent_and_documents_no_wall(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(lambda _, shape, __: float(shape.num_documents))
    curve = sweep(named_shape("packed-24k"), "num_documents", [8, 64]).scaling[0]
    assert curve.exponent is None
    assert curve.wall is None


@pytest.mark.parametrize("name", ["tiny", "qwen3-8b-3072"])
def test_no_wall_of_anchors_is_looked_for_beyond_the_tokens(plans: Any, name: str) -> None:  # noqa: ANN401
    plans[1].append(lambda _, shape, __: float(shape.num_anchors))
    shape = named_shape(name)
    curve = sweep(shape, "num_anchors", [16, 32, 64]).scaling[0]
    assert curve.step_ms == [16.0, 32.0, 64.0]
    assert curve.wall is None


def test_the_wall_of_anchors_is_the_first_that_does_not_fit(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(lambda _, shape, __: float(shape.num_anchors))
    curve = sweep(named_shape("packed-49k"), "num_anchors", [4096, 8192, 16384]).scaling[0]
    assert curve.wall is not None
    assert 4096 < curve.wall < 8192
    at = sweep(named_shape("packed-49k"), "num_anchors", [int(curve.wall) - 8, int(curve.wall)])
    below, first = at.scaling[0].planned_gib
    assert below is not None
    assert first is not None
    assert below + 1 <= H200.memory_gib < first + 1


def test_numbers_of_drafters_are_plans_of_their_own_in_one_bench(plans: Any) -> None:  # noqa: ANN401
    plans[1].append(lambda plan, _, __: 10.0 * plan.drafters)
    found = sweep(LARGE, "drafters", [1, 2, 3])
    assert [plan.drafters for plan in plans[0]] == [1, 2, 3]
    assert len(found.rows) == 6
    assert len({row.name for row in found.rows}) == 6
    curve = found.scaling[0]
    assert curve.step_ms == [10.0, 20.0, 30.0]
    one, two, three = (planned or 0.0 for planned in curve.planned_gib)
    assert three - two == pytest.approx(two - one)
    assert curve.wall is not None
    assert (two - one) * (curve.wall - 1) + one + 1 > H200.memory_gib
    assert len(found.shapes) == 3


def test_an_interrupt_keeps_the_values_that_were_measured(
    plans: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans[1].append(lambda plan, _, __: 10.0 * plan.drafters)
    whole = scaling.run_bench

    def interrupted(*asked: BenchPlan, say: Callable[[str], None]) -> Bench:
        return whole(*asked[:2], say=say).model_copy(update={"complete": False})

    monkeypatch.setattr(scaling, "run_bench", interrupted)
    found = sweep(LARGE, "drafters", [1, 2, 3])
    assert not found.complete
    assert [plan.drafters for plan in plans[0]] == [1, 2]
    assert found.scaling[0].values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("over", "values", "says"),
    [
        ("token_budget", [8192, 10_000, 70], "10000, 70 .* multiples of 128"),
        ("num_anchors", [512, 500], "500 .* multiples of 8"),
        ("num_documents", [1, 4096], "4096 .* at most 1024 documents of 3"),
        ("drafters", [0, 1], "0 .* multiples of 1"),
        ("drafters", [1, 10**20], "10{20} .* at most 64 threads"),
    ],
)
def test_values_that_no_batch_can_have_are_refused_before_anything_runs(
    over: Over, values: list[int], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        sweep(LARGE, over, values)


@pytest.mark.slow
def test_drafters_are_swept_in_one_bench_under_one_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one number of drafters does is not somebody else's work before the next."""
    watches: list[tuple[str, ...]] = []

    class Counted(Watch):
        def __init__(self, devices: Sequence[str]) -> None:
            super().__init__(devices)
            watches.append(tuple(devices))

    monkeypatch.setattr("dflash_bench.session.Watch", Counted)
    plan = BenchPlan(
        cases=("mask",),
        shapes=(TINY,),
        modes=("launched",),
        devices=("cpu",),
        max_time_s=0.5,
        min_pairs=2,
        turn_steps=2,
    )
    found = run_scaling(plan, "drafters", [1, 2], say=lambda _: None)
    assert watches == [("cpu",)]
    assert found.scaling[0].values == [1.0, 2.0]
    assert all(step_ms is not None and step_ms > 0 for step_ms in found.scaling[0].step_ms)
    assert list(found.shapes) == ["tiny:drafters=1", "tiny:drafters=2"]


@pytest.mark.slow
def test_a_small_sweep_is_measured_on_a_cpu() -> None:
    plan = BenchPlan(
        cases=("mask",),
        shapes=(TINY,),
        modes=("launched",),
        devices=("cpu",),
        max_time_s=0.5,
        min_pairs=4,
        turn_steps=3,
    )
    found = run_scaling(plan, "num_documents", [1, 2, 4], say=lambda _: None)
    (curve,) = found.scaling
    assert curve.values == [1.0, 2.0, 4.0]
    assert all(step_ms is not None and step_ms > 0 for step_ms in curve.step_ms)
    assert curve.exponent is not None
    assert curve.wall is None
