"""TensorBoard gets the figures of every record; without the package the user is told how."""

from importlib import util
from pathlib import Path

import pytest

from dflash.errors import MissingError
from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.report.tensorboard import TensorBoardSink

STEP = StepRecord(step=3, loss=2.5, lr=0.5, grad_norm=1.0, allocated_gib={"cuda:0": 1.5})
EVAL = EvalRecord(
    step=4, tau=2.0, tau_per_prompt=[2.0], accepted_per_position=[0.75, 0.25],
    tokens_per_s_drafter=20.0, num_prompts=1, max_new_tokens=8,
)  # fmt: skip


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_figure_of_a_record_is_a_point(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    sink = TensorBoardSink(tmp_path)
    for record in (STEP, EVAL, EventRecord(step=5, name="checkpoint", detail={"path": "p"})):
        sink.write(record)
    sink.close()
    found = points(tmp_path)
    assert found["step/loss"] == [(3, 2.5)]
    assert found["step/allocated_gib/cuda:0"] == [(3, 1.5)]
    assert found["eval/tau"] == [(4, 2.0)]
    assert found["eval/accepted_at/2"] == [(4, 0.25)]
    assert "step/accepted_tokens_per_block" not in found  # it was not measured


def test_a_resumed_run_hides_the_points_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    first = TensorBoardSink(tmp_path)
    for number in (1, 2, 3):
        first.write(STEP.model_copy(update={"step": number}))
    first.close()
    second = TensorBoardSink(tmp_path, resumed_after=1)
    second.write(STEP.model_copy(update={"step": 2, "loss": 7.0}))
    second.close()
    assert points(tmp_path)["step/loss"] == [(1, 2.5), (2, 7.0)]


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(MissingError) as caught:
        TensorBoardSink(tmp_path)
    assert "dflash-trainer[tensorboard]" in caught.value.hint
