"""What was made ready is all that runs: another shape, a recompile, a late allocation is told."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from programs import Counting, number
from torch import Tensor

from dflash.execution import Runner, SealedError, process_seal, sealed, unsealed
from dflash.execution.seal import device_allocations


@pytest.fixture(autouse=True)
def no_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile for real, but run what was traced."""
    real = torch.compile
    torch.compiler.reset()

    def eagerly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:  # noqa: ANN401
        return real(function, **options | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", eagerly)
    yield
    torch.compiler.reset()


def compiled() -> tuple[Counting, Runner]:
    program = Counting()
    runner = Runner(program, "compiled")
    runner.warm_up()
    return program, runner


def test_a_recompile_of_a_sealed_program_is_one_clear_error() -> None:
    program, runner = compiled()
    with sealed():
        runner.feed(number(4.0))
        runner("normal")
        assert float(program.result) == 10.0
        program.inputs["number"] = torch.zeros(3)
        with pytest.raises(SealedError, match=r'part "normal" would compile again in thread') as no:
            runner("normal")
    assert "MainThread" in no.value.what
    assert "rank" in no.value.what or "size" in no.value.what
    assert "\n" not in no.value.what
    assert no.value.exit_code == 14
    runner("normal")
    assert program.result.tolist() == [2.0, 2.0, 2.0], "afterwards it may"


def test_what_is_no_part_of_it_may_compile_unsealed() -> None:
    program, runner = compiled()
    with sealed():
        with unsealed():
            assert float(torch.compile(lambda x: x + 1)(torch.ones(()))) == 2.0
        program.inputs["number"] = torch.zeros(3)
        with pytest.raises(SealedError):
            runner("normal")


def test_another_error_stays_what_it_is() -> None:
    program, runner = compiled()

    def broken(_: Tensor) -> Tensor:
        msg = "a bug in the part itself"
        raise RuntimeError(msg)

    program.double = broken
    with sealed(), pytest.raises(RuntimeError, match=r"^a bug in the part itself$"):
        runner("normal")


def test_sealing_twice_is_a_mistake_and_opening_twice_is_none() -> None:
    with sealed() as seal:
        with pytest.raises(AssertionError, match="sealed twice"):
            seal.close()
        assert seal.closed
    assert seal.open() == {}
    assert not process_seal().closed


def test_a_gpu_that_the_process_does_not_use_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = [{"num_device_alloc": 3}, {"num_device_alloc": 0}, {}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(stats))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda n: stats[n])
    assert device_allocations() == {"cuda:0": 3}


def test_late_allocations_are_counted_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"cuda:0": 5, "cuda:1": 7}
    monkeypatch.setattr("dflash.execution.seal.device_allocations", lambda: dict(counts))
    with sealed() as seal:
        assert seal.new_allocations == {"cuda:0": 0, "cuda:1": 0}
        counts["cuda:1"] += 2
        with unsealed():
            counts["cuda:0"] += 10
        assert seal.new_allocations == {"cuda:0": 0, "cuda:1": 2}
        assert seal.open() == {"cuda:0": 0, "cuda:1": 2}


@pytest.mark.parametrize(
    ("fed", "sentence"),
    [
        (torch.zeros(2), r"input number has shape \(2,\), but .* ready for shape \(\)"),
        (torch.zeros((), dtype=torch.int64), "has dtype torch.int64, .* dtype torch.float32"),
    ],
)
def test_another_signature_is_refused_by_the_tensor_s_name(fed: Tensor, sentence: str) -> None:
    program = Counting()
    runner = Runner(program, "eager")
    with pytest.raises(SealedError, match=sentence) as caught:
        runner.feed({"number": fed})
    assert "pad it" in caught.value.hint
    assert float(program.inputs["number"]) == 0.0


def test_other_strides_and_names_are_refused_too() -> None:
    program = Counting()
    program.inputs = {"table": torch.zeros(2, 3)}
    runner = Runner(program, "eager")
    with pytest.raises(SealedError, match=r"table has strides \(1, 2\), .* strides \(3, 1\)"):
        runner.feed({"table": torch.zeros(3, 2).t()})
    with pytest.raises(SealedError, match="the difference is chair, table"):
        runner.feed({"chair": torch.zeros(2, 3)})
