"""Records survive a killed process: whole lines are kept, a torn one is dropped."""

import math
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash.errors import DataError
from dflash.records import (
    EvalRecord,
    EventRecord,
    RecordWriter,
    StepRecord,
    read_records,
    truncate_after,
)

STEP = StepRecord(step=1, loss=2.5, lr=1e-3, grad_norm=0.5, allocated_gib={"cuda:0": 1.5})
EVAL = EvalRecord(
    step=2, tau=2.0, tau_per_prompt=[1.5, 2.5], accepted_per_position=[0.7, 0.3],
    tokens_per_s_drafter=20.0, tokens_per_s_plain=10.0, speedup=2.0, num_prompts=2,
    max_new_tokens=16,
)  # fmt: skip
EVENT = EventRecord(step=3, name="checkpoint", detail={"path": "checkpoints/step-3", "bytes": 7})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "records.jsonl"
    with RecordWriter(path) as writer:
        for record in (STEP, EVAL, EVENT):
            writer.write(record)
    return path


def tear(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"step": 4, "kind": "st')


def test_what_is_written_is_read_back(path: Path) -> None:
    assert list(read_records(path)) == [STEP, EVAL, EVENT]


def test_a_record_is_on_disk_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.write(STEP)
    assert list(read_records(path)) == [STEP]
    writer.close()


def test_a_torn_last_line_is_left_out(path: Path) -> None:
    tear(path)
    assert list(read_records(path)) == [STEP, EVAL, EVENT]


def test_a_writer_cuts_a_torn_line_off_before_it_appends(path: Path) -> None:
    tear(path)
    with RecordWriter(path) as writer:
        writer.write(STEP)
    assert list(read_records(path)) == [STEP, EVAL, EVENT, STEP]


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:

        def write(name: str) -> None:
            for step in range(50):
                writer.write(EventRecord(step=step, name=name, detail={"fill": "x" * 500}))

        threads = [threading.Thread(target=write, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_records(path))) == 200


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [STEP]), (2, [STEP, EVAL])])
def test_a_resumed_run_drops_the_steps_it_will_repeat(
    path: Path, step: int, kept: list[object]
) -> None:
    tear(path)
    assert truncate_after(path, step) == 3 - len(kept)
    assert list(read_records(path)) == kept
    assert list(path.parent.iterdir()) == [path]


def test_a_run_without_records_has_nothing_to_drop(tmp_path: Path) -> None:
    assert truncate_after(tmp_path / "none.jsonl", 3) == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{nonsense}", "line: Invalid JSON"),
        ('{"kind": "step", "step": 4}', "step.loss: Field required"),
        ('{"kind": "other", "step": 4}', "'kind'"),
        ('{"kind": "event", "step": -1, "name": "x"}', "event.step"),
    ],
)
def test_damage_is_named_by_file_and_line(path: Path, line: str, says: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"records\.jsonl:4 is not a record") as caught:
        list(read_records(path))
    assert says in str(caught.value)


def test_a_line_without_a_step_stops_a_resume(path: Path) -> None:
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"records\.jsonl:1 is not a record"):
        truncate_after(path, 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_misspelt_value_is_refused() -> None:
    with pytest.raises(ValidationError):
        StepRecord(step=1, loss=1.0, lr=1.0, grad_norm=1.0, los=2.0)  # type: ignore[call-arg]


def test_a_loss_that_is_not_a_number_survives(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        writer.write(StepRecord(step=1, loss=math.nan, lr=0.1, grad_norm=math.inf))
    (record,) = read_records(path)
    assert isinstance(record, StepRecord)
    assert math.isnan(record.loss)
    assert record.grad_norm == math.inf
