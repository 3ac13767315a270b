"""A stranger's loss and optimizer run as a program, and the page that says how is right."""

import shutil
from collections.abc import Callable, Mapping

import pytest
import torch
from pages import run_examples
from torch import Tensor

from dflash.execution import Runner, TrainingStep

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def make_step(optimizer: Make | None = None, **options: object) -> TrainingStep:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    return TrainingStep(
        loss,
        optimizer=make(list(model.parameters())),
        inputs={"x": torch.zeros(16, 4), "y": torch.zeros(16, 1)},
        **options,  # type: ignore[arg-type]
    )


def batch(seed: int) -> dict[str, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(1, keepdim=True)}


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_a_plain_loop_does_whether_or_not_it_was_warmed_up(name: str) -> None:
    """The plain loop knows nothing of programs."""
    step, plain = make_step(OPTIMIZERS[name]), make_step(OPTIMIZERS[name])
    runner = Runner(step, "eager")
    runner.feed(batch(99))
    runner.warm_up()
    runner.enter_worker()
    losses = []
    for seed in range(5):
        runner.feed(batch(seed))
        runner("normal")
        runner("update")
        plain.optimizer.zero_grad()
        loss = plain.loss(batch(seed))
        loss.backward()
        losses.append(loss.item())
        plain.optimizer.step()
    for mine, theirs in zip(step.parameters, plain.parameters, strict=True):
        assert torch.equal(mine, theirs)
    assert float(step.probe()[0]) == pytest.approx(sum(losses))
    assert float(step.probe()[2]) == 5.0


def test_a_rehearsal_in_the_middle_of_training_leaves_no_trace() -> None:
    norm = torch.nn.BatchNorm1d(4)
    step = make_step(changed=[buffer for buffer in norm.buffers() if buffer.is_floating_point()])
    inner = step.loss
    step.loss = lambda inputs: inner({**inputs, "x": norm(inputs["x"])})
    runner = Runner(step, "eager")
    runner.feed(batch(0))
    runner("normal")
    runner("update")
    state = [tensor.detach().clone() for tensor in step._state()]  # noqa: SLF001
    with step.rehearsal():
        assert step.probe().tolist() == [0.0, 0.0, 0.0]
        for _ in range(3):
            runner("normal")
            runner("update")
        assert float(step.probe()[2]) == 3.0
    after = step._state()  # noqa: SLF001
    assert all(torch.equal(one, other) for one, other in zip(state, after, strict=True))
    assert all(parameter.grad is None for parameter in step.parameters)


def test_gradients_may_be_read_between_the_parts_and_put_back() -> None:
    step = make_step()
    step.parts["normal"]()
    carried = step.carried()
    assert all(gradient is not None for gradient in carried)
    step.carry([None] * len(carried))
    assert step.carried() == [None] * len(carried)
    step.carry(carried)
    assert step.carried()[0] is carried[0]


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if not (torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("it compiles, and there is no C++ compiler")
    torch.compiler.reset()
    run_examples("execution.md")
    first, last = (float(line) for line in capsys.readouterr().out.split())
    assert last < first
