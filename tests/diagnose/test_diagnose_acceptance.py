"""Acceptance that training alone counts is told on enough evidence, with what else it may be."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash.diagnose.acceptance import accepted_in_training_alone
from dflash.diagnose.aftermath import diagnose_run
from dflash.diagnose.finished import AnyRecord, FinishedRun
from dflash.records import EvalRecord, RecordWriter, StepRecord


def step(number: int, count: float | None = 3.4, *, epoch: float = 0.5) -> StepRecord:
    return StepRecord(
        step=number, loss=1.0, lr=1e-3, grad_norm=1.0, accepted_tokens_per_block=count,
        epoch=epoch, tokens=1000 * number,
    )  # fmt: skip


def evaluation(number: int, *, steps: Sequence[int], num_prompts: int = 8) -> EvalRecord:
    """One whose prompts all need as many verify steps; *steps* committed 1, 2, .. tokens."""
    tau = sum(count * committed for committed, count in enumerate(steps, 1)) / sum(steps)
    return EvalRecord(
        step=number, tau=tau, tau_per_prompt=[tau] * num_prompts + [None],
        accepted_per_position=[], steps_by_accepted_tokens=list(steps), num_prompts=num_prompts,
        tokens_per_s_drafter=1.0, max_new_tokens=16,
    )  # fmt: skip


def told(*records: AnyRecord) -> list[str]:
    return list(accepted_in_training_alone(FinishedRun(records=records)))


TRAINED = tuple(step(number) for number in (10, 20, 30))
UNTRAINED = evaluation(0, steps=[120, 0])


def test_a_drafter_of_which_decoding_accepts_nothing_was_taught_something_else(
    tmp_path: Path,
) -> None:
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        for record in (UNTRAINED, *TRAINED, evaluation(30, steps=[120, 0])):
            writer.write(record)
    found = diagnose_run(tmp_path).suffered
    assert [each.slug for each in found] == ["future-leak", "label-shift"]
    assert found[0].evidence[0] == (
        "step 30: training counts 3.40 accepted tokens per block or more, decoding 8 held-out"
        " prompts accepts in 0 of 120 verify steps (tau 1.00, 95 %: at most 2.5% of steps)"
    )  # 1 - 0.05 ** (1 / 120) is 0.0247


def test_a_healthy_run_that_was_overfitted_in_minutes_is_not_accused() -> None:
    """Two prompts of sixteen tokens, after a hundred passes over a few texts."""
    passes = [step(number, 12.0, epoch=float(number)) for number in (80, 90, 100)]
    assert told(*passes, evaluation(100, steps=[30, 0], num_prompts=2)) == []


@pytest.mark.parametrize(
    ("steps", "num_prompts", "is_enough"),
    [
        ([59, 0], 8, True),  # 0.95 ** 59 is 0.048
        ([58, 0], 8, False),  # 0.95 ** 58 is 0.051
        ([59, 0], 7, False),
        ([150, 3], 8, True),
        ([149, 3], 8, False),
        ([1000, 200], 64, False),
    ],
)
def test_the_share_of_accepting_steps_must_be_small_for_certain(
    steps: list[int], num_prompts: int, *, is_enough: bool
) -> None:
    assert bool(told(*TRAINED, evaluation(30, steps=steps, num_prompts=num_prompts))) is is_enough


@pytest.mark.parametrize("counts", [(3.4, 3.4), (3.4, 1.9, 3.4), (3.4, None, 3.4)])
def test_training_must_count_much_in_three_records(counts: tuple[float | None, ...]) -> None:
    steps = [step(10 * number, count) for number, count in enumerate(counts, 1)]
    assert told(*steps, evaluation(40, steps=[120, 0])) == []


def test_records_without_a_count_are_passed_over() -> None:
    sparse = [one for record in TRAINED for one in (record, step(record.step + 1, None))]
    assert told(*sparse, evaluation(40, steps=[120, 0]))


def test_a_run_that_was_accepted_from_once_was_taught_the_right_thing() -> None:
    nothing = evaluation(30, steps=[120, 0])
    assert told(*TRAINED, evaluation(20, steps=[80, 40]), nothing) == []
    assert told(*TRAINED, nothing, evaluation(40, steps=[80, 40])) == []
    assert told(*TRAINED, evaluation(20, steps=[19, 1]), nothing), "1 of 20 may be luck"


def test_an_evaluation_of_a_version_that_did_not_count_its_steps_shows_nothing() -> None:
    unknown = evaluation(30, steps=[120, 0]).model_copy(update={"steps_by_accepted_tokens": []})
    assert told(*TRAINED, unknown) == []


def test_overfitting_is_named_where_there_were_several_passes_over_the_texts() -> None:
    passes = [step(number, epoch=number / 2) for number in (10, 20, 30)]
    (_, doubt) = told(*passes, evaluation(30, steps=[120, 0]))
    assert doubt.startswith("or it is overfitting: 15.0 passes over 2000 tokens;")
    assert "dflash eval --prompts" in doubt
    (_, first_pass) = told(*TRAINED, evaluation(30, steps=[120, 0]))
    assert first_pass.startswith("overfitting does not explain it")
