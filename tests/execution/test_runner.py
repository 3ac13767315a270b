"""A runner makes a program ready in the main thread, and then only calls it."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Counting, number
from tiny_runs import events_of, run, steps_of, tiny_config

from dflash.execution import Runner, choose_mode
from dflash.execution.report import WarmUp
from dflash.records import EventRecord, StepRecord


@pytest.fixture
def compiled_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile without code generation; return the names of the threads that did."""
    threads: list[str] = []
    real = torch.compile

    def recording(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        threads.append(threading.current_thread().name)
        return module.forward

    def compile_with(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:  # noqa: ANN401
        options.pop("options", None)  # Inductor's own
        return real(function, **options | {"backend": recording})

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compile_with)
    return threads


def test_warming_up_runs_every_round_twice_inside_a_rehearsal() -> None:
    program = Counting()
    runner = Runner(program, "eager")
    assert program.calls == []
    runner.feed(number(5.0))
    runner.warm_up()
    assert program.calls == [("normal", 5.0, True), ("update", 5.0, True)] * 2
    assert runner.report.warm_up_s > 0
    runner.feed(number(3.0))
    runner("normal")
    assert program.calls[-1] == ("normal", 3.0, False)
    assert float(program.result) == 8.0


def test_a_part_out_of_its_order_is_refused_in_every_mode() -> None:
    several = (("normal", "normal_add", "update"), ("metric", "metric_add", "update"))
    program = Counting(several)
    runner = Runner(program, "eager")
    runner.warm_up()
    program.calls.clear()
    sound = ["normal", "normal_add", "normal_add", "update", "metric", "metric_add", "update"]
    begun_anew = ["normal", "normal", "metric"]
    for part in (*sound, *begun_anew):
        runner(part)
    told = r"part 'update' does not follow metric in any round: normal, normal_add, update; metric"
    with pytest.raises(ValueError, match=told):
        runner("update")
    runner("metric_add")  # as if it had not been asked
    assert [name for name, _, _ in program.calls] == [*sound, *begun_anew, "metric_add"]
    with pytest.raises(ValueError, match="'update' does not follow the start"):
        Runner(Counting(several), "eager")("update")


def test_a_round_of_one_part_may_be_all_there_is() -> None:
    runner = Runner(Counting((("normal",),)), "eager")
    for _ in range(3):
        runner("normal")
    with pytest.raises(ValueError, match="'update' does not follow the start"):
        runner("update")


def test_an_eager_program_keeps_its_functions(compiled_in: list[str]) -> None:
    program = Counting()
    before = program.double
    Runner(program, "eager").warm_up()
    assert program.double is before
    assert compiled_in == []


def test_graphs_that_torch_skipped_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Counting()
    monkeypatch.setattr("dflash.execution.runner.num_skipped", lambda: len(program.calls))
    runner = Runner(program, "eager")
    runner.warm_up()
    runner.enter_worker()
    assert runner.report.num_skipped == len(program.calls) > 0
    assert runner.report.as_record()["num_skipped"] == len(program.calls)


def test_what_a_worker_makes_ready_joins_what_the_main_thread_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From torch 2.13 on torch's own graphs are captured by the worker, all of them."""
    parts = SimpleNamespace(
        warm_up=lambda: WarmUp(num_graphs=1, difference=0.5, launched_s=2.0),
        enter_worker=lambda: WarmUp(num_graphs=4, difference=0.0, worker_difference=0.25),
    )
    monkeypatch.setattr("dflash.execution.runner._execution_of", lambda *_, **__: parts)
    compiled = iter([10, 11, 20, 23])
    monkeypatch.setattr("dflash.execution.runner.num_compiled", lambda: next(compiled))
    runner = Runner(Counting(), "warmed")
    runner.warm_up()
    before_s = runner.report.warm_up_s
    runner.enter_worker()
    found = runner.report
    assert (found.num_graphs, found.num_compiled) == (1 + 4, 1 + 3)
    assert (found.difference, found.worker_difference, found.launched_s) == (0.0, 0.25, 2.0)
    assert found.warm_up_s > before_s > 0


def test_a_compiled_program_has_its_regions_replaced(compiled_in: list[str]) -> None:
    program = Counting()
    runner = Runner(program, "compiled")
    assert compiled_in == [], "not before it is warmed up"
    runner.warm_up()
    assert compiled_in == ["MainThread"]
    runner.feed(number(2.0))
    runner("normal")
    assert float(program.result) == 6.0
    assert compiled_in == ["MainThread"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mode be chosen though there may be no C++ compiler."""
    monkeypatch.setattr("shutil.which", lambda name: name)


@pytest.mark.usefixtures("compiled")
def test_a_run_compiles_in_the_main_thread_before_any_worker_starts(
    place: Path, tmp_path: Path, compiled_in: list[str]
) -> None:
    workers: list[str] = []
    compiled_at_step: set[int] = set()

    def show(record: object) -> None:
        if isinstance(record, StepRecord):
            compiled_at_step.add(len(compiled_in))
        elif isinstance(record, EventRecord) and record.name == "warm_up":
            workers.extend(t.name for t in threading.enumerate() if t.name.startswith("drafter"))
            assert len(compiled_in) >= 3, "prepare, layers and chunk"

    config = tiny_config(place, execution={"mode": "compiled"}, optim={"max_steps": 8})
    run(config, tmp_path / "compiled", show=show)
    assert workers == []
    assert set(compiled_in) == {"MainThread"}
    assert compiled_at_step == {len(compiled_in)}, "nothing is compiled once steps run"
    run(tiny_config(place, optim={"max_steps": 8}), tmp_path / "eager")
    assert steps_of(tmp_path / "compiled") == steps_of(tmp_path / "eager")
    (warm_up,) = events_of(tmp_path / "compiled", "warm_up")
    assert warm_up.detail["mode"] == "compiled"


@pytest.mark.slow
def test_compiled_steps_give_the_losses_of_eager_ones(place: Path, tmp_path: Path) -> None:
    """With real code generation; rounding differs where kernels are fused, and Adam carries it."""
    try:
        choose_mode("compiled", ["cpu"])
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))
    torch.compiler.reset()
    for mode in ("eager", "compiled"):
        config = tiny_config(place, execution={"mode": mode}, optim={"max_steps": 12})
        run(config, tmp_path / mode)
    eager, compiled = (steps_of(tmp_path / mode) for mode in ("eager", "compiled"))
    assert [r["step"] for r in compiled] == [4, 8, 12]
    for one, other in zip(eager, compiled, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
