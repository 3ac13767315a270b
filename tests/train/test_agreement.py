"""A replica whose bits differ is found, named, and ends the run; equal ones never are."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import batch, make_step
from tiny_runs import events_of, run, tiny_config

from dflash.errors import ReplicasDifferError
from dflash.pipeline.lifeline import Halted, Lifeline
from dflash.train import agreement as agreement_module
from dflash.train.agreement import Agreement, checksums
from dflash.train.step import TrainStep


def moved(count: int) -> list[TrainStep]:
    """Equal replicas after one step on the same batch."""
    steps = [make_step(batch(0)) for _ in range(count)]
    for step in steps:
        step.set_lr(1e-2)
        step.parts["normal"]()
        step.parts["update"]()
    return steps


def flip_last_bit(tensor: torch.Tensor, index: int = -1) -> None:
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(-1).view(bits)[index] ^= 1


def word_sum(tensor: torch.Tensor) -> int:
    """The checksum by its definition, byte by byte: whole 8-byte words, else the elements."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
    size = 8 if len(raw) % 8 == 0 else tensor.element_size()
    words = [
        int.from_bytes(bytes(raw[start : start + size]), "little", signed=True)
        for start in range(0, len(raw), size)
    ]
    total = sum(words) % 2**64
    return total - 2**64 if total >= 2**63 else total


def test_a_checksum_is_the_wrapped_sum_of_words() -> None:
    (step,) = moved(1)
    weights = dict(step.loss.drafter.named_parameters())
    expected = [word_sum(tensor) for tensor in (*weights.values(), *step.moments().values())]
    assert checksums(step).tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_any_single_bit_of_any_tensor_changes_its_checksum(share: float) -> None:
    (step,) = moved(1)
    tensors = [*step.loss.drafter.parameters(), *step.moments().values()]
    before = checksums(step)
    for number, tensor in enumerate(tensors):
        index = min(tensor.numel() - 1, math.floor(share * tensor.numel()))
        flip_last_bit(tensor, index)
        assert (checksums(step) != before).nonzero().flatten().tolist() == [number]
        flip_last_bit(tensor, index)
    assert checksums(step).equal(before)


@pytest.mark.parametrize("replica", [1, 2])
def test_a_replica_that_differs_is_named_with_its_step_and_tensor(replica: int) -> None:
    steps = moved(3)
    compare = Agreement(steps, every_steps=2, last_step=9)
    for step in (1, 2):
        for number in (2, 1, 0):
            compare(number, step)
    assert compare.last_agreed == 2
    flip_last_bit(
        dict(steps[replica].loss.drafter.named_parameters())["layers.1.mlp.up_proj.weight"]
    )
    for number in (2, 1):
        compare(number, 4)
    with pytest.raises(ReplicasDifferError, match=f"step 4: .*up_proj.*drafter {replica}") as told:
        compare(0, 4)
    assert "layers.1.mlp.up_proj.weight" in told.value.what
    assert "they were equal up to step 2: go on from a checkpoint no later" in told.value.hint
    assert told.value.exit_code == 1


def test_where_nothing_was_compared_before_no_checkpoint_is_recommended() -> None:
    steps = moved(2)
    flip_last_bit(steps[1].parameters[0].data)
    compare = Agreement(steps, every_steps=2, last_step=9)
    compare(1, 2)
    with pytest.raises(ReplicasDifferError, match="step 2: ") as told:
        compare(0, 2)
    assert told.value.hint.startswith("this was the first comparison: go back to the checkpoint")


def test_only_the_steps_that_are_due_are_compared() -> None:
    compare = Agreement(moved(2), every_steps=3, last_step=7)
    assert [step for step in range(1, 8) if compare.due(step)] == [3, 6, 7]
    assert not any(Agreement(moved(2), every_steps=0, last_step=7).due(n) for n in range(1, 8))
    assert not any(Agreement(moved(1), every_steps=1, last_step=7).due(n) for n in range(1, 8))


def test_settling_waits_for_a_replica_that_is_behind() -> None:
    steps = moved(2)
    compare = Agreement(steps, every_steps=1, last_step=1)
    compare(0, 1)
    assert compare.last_agreed is None
    threading.Timer(0.05, lambda: compare(1, 1)).start()
    compare.settle(Lifeline())
    assert compare.last_agreed == 1


def test_settling_ends_with_the_run() -> None:
    life, compare = Lifeline(), Agreement(moved(2), every_steps=1, last_step=1)
    compare(0, 1)
    threading.Timer(0.05, life.halt).start()
    with pytest.raises(Halted):
        compare.settle(life)


TWO = {"drafter": {"devices": ("cpu", "cpu")}, "optim": {"max_steps": 12}}


def corrupting(at_call: int) -> Callable[[TrainStep], torch.Tensor]:
    """``checksums``, but the replica of call *at_call* has one bit of one weight flipped before."""
    calls = []

    def broken(step: TrainStep) -> torch.Tensor:
        calls.append(step)
        if len(calls) == at_call:
            flip_last_bit(step.loss.drafter.fc.weight)
        return checksums(step)

    return broken


def test_a_corrupted_replica_ends_the_run_before_its_weights_are_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: Any = TWO | {
        "execution": {"check_replicas_every": 4},
        "checkpoint": {"every_steps": 4},
    }
    config = tiny_config(place, **changes)
    # Two warm the comparison up, two compare step 4; the next is one replica's at step 8.
    monkeypatch.setattr(agreement_module, "checksums", corrupting(5))
    with pytest.raises(ReplicasDifferError, match=r"step 8: fc.weight of drafter 1 on cpu differs"):
        run(config, tmp_path / "run")
    kept = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000004"]


def test_sound_replicas_train_to_the_end(place: Path, tmp_path: Path) -> None:
    changes: Any = TWO | {"execution": {"check_replicas_every": 1}}
    assert run(tiny_config(place, **changes), tmp_path / "run").step == 12
    assert events_of(tmp_path / "run", "checkpoint")
