"""On a GPU: every mode trains alike, replays in its worker, allocates nothing, and fails clean."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mode_cases import (
    DEVICE,
    Trained,
    allocate_nothing,
    batches,
    busy,
    goes_on,
    in_worker,
    make_step,
    one_step,
    train,
)
from pages import run_examples
from torch import Tensor

from dflash.drafter.training import StepInputs
from dflash.execution import (
    CaptureError,
    Mode,
    ModeChoice,
    Runner,
    SealedError,
    TrainingStep,
    capture,
    capture_watch,
    make_ready,
    sealed,
    unsealed,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Advice of the compiler about speed, and torch's note that this debug mode is a prototype.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
LAUNCHED_TWICE = 0.02
"""Relative, of a loss: eager rounds to bf16 after every operation where compiled code keeps fp32
inside a kernel, 2**-8 each, and 50 updates carry the difference on."""


@pytest.fixture
def no_host_sync() -> Iterator[Callable[[], None]]:
    """Return what makes every later wait for the device an error."""
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


def test_compiled_trains_as_eager_does(trained: Callable[[Mode], Trained]) -> None:
    eager, compiled = trained("eager"), trained("compiled")
    assert eager.losses[-5:].mean() < eager.losses[:5].mean(), "nothing is learnt, so nothing shown"
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=LAUNCHED_TWICE, atol=0)


def test_graphed_is_compiled_bit_for_bit(trained: Callable[[Mode], Trained]) -> None:
    compiled, graphed = trained("compiled"), trained("graphed")
    report = graphed.runner.report
    assert report.num_graphs == 4, "normal and metric, each with its own update"
    assert (report.difference, report.worker_difference) == (0.0, 0.0)
    assert torch.equal(graphed.sums, compiled.sums)
    for name, weight in compiled.weights.items():
        assert torch.equal(graphed.weights[name], weight), name


def test_accumulated_steps_replay_bit_for_bit_too(data: list[StepInputs]) -> None:
    sums = {}
    modes: tuple[Mode, ...] = ("compiled", "graphed")
    for mode in modes:
        step = make_step(optim={"accumulate_steps": 3})
        runner = Runner(step, mode)
        runner.feed(data[0]._asdict())
        runner.warm_up()

        def work(step=step, runner=runner) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
            runner.enter_worker()
            with torch.cuda.stream(runner.stream):
                for number in range(0, 12, 3):
                    part = "metric" if number == 9 else "normal"
                    for offset, name in enumerate((part, f"{part}_add", f"{part}_add")):
                        runner.feed(data[number + offset]._asdict())
                        runner(name)
                    step.set_lr(1e-3)
                    runner("update")

        in_worker(work)
        torch.cuda.synchronize()
        sums[mode] = step.totals.sums.cpu()
        runner.close()
    assert torch.equal(sums["compiled"], sums["graphed"])


def test_gradients_are_there_between_two_graphs(data: list[StepInputs]) -> None:
    """The sum over drafters stands there."""
    found: dict[str, list[list[Tensor]]] = {}
    modes: tuple[Mode, ...] = ("compiled", "graphed")
    for mode in modes:
        step = make_step()
        runner = Runner(step, mode)
        runner.feed(data[0]._asdict())
        runner.warm_up()
        found[mode] = []
        with torch.cuda.stream(runner.stream):
            for part in ("normal", "metric", "normal"):
                runner(part)
                found[mode].append([gradient.clone() for gradient in step.gradients()])
                runner("update")
        torch.cuda.synchronize()
        runner.close()
    for one, other in zip(found["compiled"], found["graphed"], strict=True):
        assert any(gradient.any() for gradient in one)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_replay_draws_anchors_of_its_own(data: list[StepInputs]) -> None:
    step = make_step()
    runner = Runner(step, "graphed")
    runner.feed(data[0]._asdict())
    runner.warm_up()
    losses = []
    for number in (7, 8, 7, 9):
        runner.feed(data[0]._replace(batch_number=torch.tensor(number, device=DEVICE))._asdict())
        with torch.cuda.stream(runner.stream):
            torch.cuda.synchronize()
            runner("normal")
            losses.append(float(step.loss_sum))
            step.totals.step_sums.zero_()
    runner.close()
    assert losses[0] == losses[2]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("mode", ["eager", "compiled", "graphed"])
def test_a_step_never_waits_for_the_host(
    mode: Mode, data: list[StepInputs], no_host_sync: Callable[[], None]
) -> None:
    step = make_step()
    runner = Runner(step, mode)
    runner.feed(data[0]._asdict())
    runner.warm_up()

    def work() -> None:
        runner.enter_worker()
        with torch.cuda.stream(runner.stream):
            one_step(runner, step, data[0], number=0)
            no_host_sync()
            for number in range(8, 12):
                one_step(runner, step, data[number], number=number)

    in_worker(work)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    runner.close()
    assert bool(step.totals.sums.isfinite().all())


def test_a_third_shape_is_refused_by_its_name(data: list[StepInputs]) -> None:
    runner = Runner(make_step(), "eager")
    good = data[0]._asdict()
    shorter = {**good, "tokens_T": good["tokens_T"][:-128].contiguous()}
    with pytest.raises(SealedError, match=r"tokens_T has shape \(896,\).* shape \(1024,\)"):
        runner.feed(shorter)
    with pytest.raises(SealedError, match=r"features_TC has dtype torch.float32.*bfloat16"):
        runner.feed({**good, "features_TC": good["features_TC"].float()})
    with pytest.raises(SealedError, match="features_TC has strides"):
        runner.feed({**good, "features_TC": good["features_TC"].t().contiguous().t()})
    runner.close()


def little_step(*, waits: Callable[[], bool]) -> TrainingStep:
    """A step whose loss asks the host something while *waits* says so."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32, device=DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2, device=DEVICE), fused=True, capturable=True
    )

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        error = model(inputs["x"]).square().mean()
        if waits():
            error = error * float(error.item() >= 0)
        return error

    step = TrainingStep(
        loss,  # type: ignore[arg-type]
        optimizer=optimizer,
        inputs={"x": torch.ones(64, 32, device=DEVICE)},
    )
    step.regions = list  # type: ignore[method-assign]  # nothing to compile
    return step


def test_a_capture_that_fails_says_what_and_where_and_leaves_the_process_clean() -> None:
    waits = True
    step = little_step(waits=lambda: waits)
    runner = Runner(step, "graphed")
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=r'part "normal" of mode "graphed"') as caught:
        runner.warm_up()
    assert "in thread MainThread" in caught.value.what
    assert "error.item()" in caught.value.what
    assert "compiled" in caught.value.hint
    runner.close()
    assert gc.isenabled()
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    waits = False
    modes: tuple[Mode, ...] = ("eager", "graphed")
    for mode in modes:
        after = Runner(step, mode)
        after.warm_up()
        after.enter_worker()
        with torch.cuda.stream(after.stream):
            after("normal")
            after("update")
        torch.cuda.synchronize()
        after.close()
    assert float(step.sums[2]) == 2.0
    assert torch.empty(1 << 20, device=DEVICE).fill_(1).sum() == 1 << 20


def test_a_thread_captures_a_product_that_only_another_has_made() -> None:
    """A cuBLAS handle belongs to a thread, and a capture cannot make one."""
    stream = torch.cuda.Stream()
    x = torch.ones(64, 64, device=DEVICE)
    out = x @ x
    graphs: list[torch.cuda.CUDAGraph] = []

    def body() -> None:
        out.copy_(x @ x)

    in_worker(lambda: graphs.append(capture(body, device=DEVICE, stream=stream)))
    x.fill_(2.0)
    graphs[0].replay()
    torch.cuda.synchronize()
    assert bool((out == 256.0).all())


def test_auto_gives_way_to_what_works_and_says_why() -> None:
    said: list[str] = []
    choice = ModeChoice("graphed", "every drafter runs on a CUDA device", ("compiled", "eager"))
    step = little_step(waits=lambda: True)
    ready = make_ready([step], choice, streams=[torch.cuda.Stream()], say=said.append)
    assert ready.choice.mode == ready.runners[0].mode == "compiled"
    assert "graphed was tried first" in ready.choice.why
    assert "error.item()" in ready.choice.why
    assert said == [f"execution mode compiled: {ready.choice.why}"]
    ready.runners[0].close()


def test_auto_takes_what_is_faster_and_says_how_much() -> None:
    choice = ModeChoice("graphed", "every drafter runs on a CUDA device", ("compiled", "eager"))
    step = make_step()
    for name, tensor in batches(1)[0]._asdict().items():
        step.inputs[name].copy_(tensor)
    ready = make_ready([step], choice, streams=[torch.cuda.Stream()])
    assert ready.choice.mode == "graphed"
    assert "in a trial replaying all rounds took" in ready.choice.why
    ready.runners[0].close()


def test_a_sealed_process_captures_only_where_it_is_allowed() -> None:
    x = torch.ones(8, device=DEVICE)
    stream = torch.cuda.Stream()

    def one_capture() -> None:
        capture(lambda: x.add_(1), device=DEVICE, stream=stream)

    one_capture()
    before = capture_watch().total
    with sealed() as seal:
        with pytest.raises(SealedError, match="capture began in thread MainThread"):
            one_capture()
        with unsealed():
            one_capture()
        assert seal.new_allocations["cuda:0"] == 0, "what is allocated unsealed does not count"
    one_capture()
    assert capture_watch().total == before + 2


def test_the_example_of_the_page_runs_graphed(capsys: pytest.CaptureFixture[str]) -> None:
    before = capture_watch().total
    run_examples("execution.md")
    assert capture_watch().total == before + 2
    first, last = (float(line) for line in capsys.readouterr().out.split())
    assert last < first


@pytest.mark.parametrize("mode", ["compiled", "graphed"])
def test_two_hundred_steps_of_real_documents_allocate_nothing(
    place: Path, tmp_path: Path, mode: Mode
) -> None:
    allocate_nothing(place, tmp_path, mode)


def test_a_stopped_graphed_run_goes_on_as_if_nothing_had_been(place: Path, tmp_path: Path) -> None:
    goes_on(place, tmp_path, "graphed")


def test_graphed_replays_beside_a_busy_thread(
    trained: Callable[[Mode], Trained], data: list[StepInputs]
) -> None:
    graphed = train("graphed", data, meanwhile=busy)
    assert torch.equal(graphed.sums, trained("compiled").sums)
