"""A record says what happened since the one before, over all replicas, divided once."""

from typing import Any

import pytest
import torch

from dflash.drafter.objective import Objective
from dflash.pipeline.slots import BatchFacts
from dflash.pipeline.waiting import Waits
from dflash.records import EventRecord, StepRecord
from dflash.train.logbook import Logbook
from dflash.train.totals import Totals, averages

NOT_YET = Waits(0.0, 0.0, 0.0, 0.0)


def objective(loss: float, weight: float, **metrics: Any) -> Objective:  # noqa: ANN401
    tensors = {name: torch.tensor(value) for name, value in metrics.items()}
    sums = (torch.tensor(loss), torch.tensor(weight), torch.tensor(9))
    return Objective(*sums, **tensors)


METRICS: dict[str, Any] = {
    "correct_B": [0, 3, 1],
    "supervised_B": [0, 4, 4],
    "accepted_tokens": 9,
    "accepted_blocks": 5,
}


def test_numerators_and_denominators_are_summed_before_they_are_divided() -> None:
    totals = Totals(3, torch.device("cpu"))
    totals.add(objective(6.0, 2.0))
    totals.add(objective(1.0, 8.0, **METRICS))
    totals.end_step(torch.tensor(4.0))
    totals.add(objective(5.0, 2.0, **METRICS))
    totals.end_step(torch.tensor(2.0))
    found = averages(totals.sums)
    assert found.loss == 12.0 / 12.0
    assert found.grad_norm == 3.0
    assert found.token_accuracy == 8 / 16
    assert found.accepted_tokens_per_block == 18 / 10


def test_a_step_in_progress_is_not_in_the_averages() -> None:
    totals = Totals(3, torch.device("cpu"))
    totals.add(objective(6.0, 2.0))
    totals.end_step(torch.tensor(1.0))
    totals.add(objective(1000.0, 1.0))
    assert averages(totals.sums).loss == 3.0
    totals.zero()
    assert averages(totals.sums).loss is None
    assert float(totals.loss_sum) == 1000.0


class Case:
    """A logbook that records every second step."""

    def __init__(self) -> None:
        self.totals = Totals(3, torch.device("cpu"))
        self.records: list[StepRecord | EventRecord] = []
        self.logbook = Logbook(
            self.totals,
            self.records.append,
            every_steps=2,
            token_budget=100,
            batches_per_epoch=8,
        )

    def step(self, number: int, tokens: list[int], *, waits: Waits = NOT_YET) -> None:
        for _ in tokens:
            self.totals.add(objective(3.0 * number, 2.0))
        self.totals.end_step(torch.tensor(1.0))
        batches = [
            BatchFacts(
                number=n, num_real_tokens=t, num_supervised_tokens=t, num_documents=1, rows=()
            )
            for n, t in enumerate(tokens)
        ]
        self.logbook.end_step(number, batches, waits=lambda: waits, lr=0.5)


def test_a_record_covers_the_steps_since_the_one_before_and_every_batch_of_them() -> None:
    case = Case()
    case.logbook.start(0, NOT_YET)
    case.step(1, [100, 80])
    assert case.records == []
    case.step(2, [90, 70], waits=Waits(8.0, 2.0, 4.0, 1.0))
    case.step(3, [100, 100])
    case.step(4, [100, 100], waits=Waits(18.0, 2.5, 10.0, 1.0))
    first, second = case.records
    assert isinstance(first, StepRecord)
    assert isinstance(second, StepRecord)
    assert (first.step, first.tokens, first.epoch, first.lr) == (2, 340, 4 / 8, 0.5)
    assert first.loss == pytest.approx((2 * 3 + 2 * 6) / 8)
    assert first.padding_share == pytest.approx(1 - 340 / 400)
    assert (first.wait_target_s, first.wait_drafter_s, first.wait_data_s) == (1.0, 2.0, 0.5)
    assert (second.tokens, second.padding_share) == (740, 0.0)
    assert second.loss == pytest.approx((2 * 9 + 2 * 12) / 8)
    assert (second.wait_target_s, second.wait_drafter_s, second.wait_data_s) == (0.25, 3.0, 0.0)
    assert (first.step_s, first.tokens_per_s) == (4.0, 340 / 8)
    assert (second.step_s, second.tokens_per_s) == (5.0, 400 / 10)
    assert 0.01 < second.rss_gib < 64


def test_steps_without_a_supervised_slot_are_told_instead_of_a_loss() -> None:
    case = Case()
    case.logbook.start(0, NOT_YET)
    for number in (1, 2):
        case.totals.add(objective(0.0, 0.0))
        case.totals.end_step(torch.tensor(0.0))
        case.logbook.end_step(number, [], waits=lambda: NOT_YET, lr=0.5)
    (event,) = case.records
    assert isinstance(event, EventRecord)
    assert (event.step, event.name) == (2, "no_loss")
    assert "no slot was supervised" in event.detail["why"]
