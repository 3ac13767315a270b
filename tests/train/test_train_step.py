"""A step is the gradient of the weighted mean loss, one clipped AdamW move, and nothing else."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracles import full_logits_loss
from step_cases import GAMMA, SETTINGS, batch, load, make_step
from torch import Tensor

from dflash.drafter.training import StepInputs
from dflash.errors import NonFiniteError
from dflash.pipeline.slots import BatchFacts
from dflash.train.schedule import Cosine
from dflash.train.sentinel import NAMED_ROWS, Sentinel
from dflash.train.step import TrainStep
from dflash.train.totals import averages

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums of some hundred terms, in another order
ALPHA = 0.5


def full_loss(step: TrainStep, inputs: StepInputs, *, dpace: bool = False) -> tuple[Tensor, float]:
    """Loss sum and weight sum through full logits and loops; differentiable in the weights."""
    loss = step.loss
    prepared = loss.prepare(inputs)
    hidden_QD = loss.layers(
        inputs.features_TC,
        inputs.positions_T,
        ids_Q=prepared.ids_Q,
        positions_Q=prepared.positions_Q,
        mask=loss.attention_mask(prepared, num_context=48),
    )
    return full_logits_loss(
        hidden_QD,
        loss.head,
        prepared.labels_NB,
        weight_NB=prepared.weight_NB,
        gamma=None if dpace else GAMMA,
        dpace_alpha=ALPHA if dpace else None,
    )


def mean_gradients(step: TrainStep, batches: list[StepInputs]) -> list[Tensor]:
    """Plain autograd of the weighted mean over all *batches*."""
    sums = [full_loss(step, inputs) for inputs in batches]
    loss = torch.stack([loss for loss, _ in sums]).sum() / sum(weight for _, weight in sums)
    return list(torch.autograd.grad(loss, step.parameters))


def snapshot(step: TrainStep) -> dict[str, Tensor]:
    """Everything that a step may change."""
    everything = {**step.masters, **step.moments(), "sums": step.totals.sums}
    everything |= {"step_sums": step.totals.step_sums, "blocked": step.blocked}
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


def assert_untouched(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("signature", ["normal", "metric"])
def test_gradients_are_those_of_the_weighted_mean_loss(signature: str) -> None:
    step = make_step(batch(1))
    expected = mean_gradients(step, [batch(1)])
    step.parts[signature]()
    for parameter, gradient in zip(step.parameters, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / step.weight_sum.float(), gradient, **ROUNDING)


def test_gradients_under_dpace_are_those_of_constant_weights() -> None:
    step = make_step(batch(1), kind="dpace")
    loss, weight = full_loss(step, batch(1), dpace=True)
    expected = torch.autograd.grad(loss, step.parameters)
    step.parts["normal"]()
    assert float(step.weight_sum) == pytest.approx(weight, rel=1e-5)
    for parameter, gradient in zip(step.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


def test_accumulated_batches_are_one_bigger_mean() -> None:
    """The batches weigh by what is supervised in them, not alike."""
    batches = [batch(1), batch(2), batch(3)]
    step = make_step()
    expected = mean_gradients(step, batches)
    for inputs, part in zip(batches, ("normal", "normal_add", "normal_add"), strict=True):
        load(step, inputs)
        step.parts[part]()
    for parameter, gradient in zip(step.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad / step.weight_sum.float(), gradient, **ROUNDING)


def test_recomputing_activations_changes_no_gradient() -> None:
    plain, recomputed = make_step(batch(1)), make_step(batch(1), checkpoint=True)
    for step in (plain, recomputed):
        step.parts["normal"]()
    for one, other in zip(plain.parameters, recomputed.parameters, strict=True):
        assert torch.equal(one.grad, other.grad)


def adamw_by_hand(
    step: TrainStep, batches: list[StepInputs], rates: list[float]
) -> Iterator[tuple[list[Tensor], float]]:
    """arXiv 1711.05101, algorithm 2, in float64, with one batch a step.

    Yields the weights after each step and the norm of its gradient before the clip.
    """
    (beta1, beta2), eps = SETTINGS.betas, SETTINGS.eps
    weights = [p.detach().double() for p in step.parameters]
    first, second = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    for number, (inputs, lr) in enumerate(zip(batches, rates, strict=True), start=1):
        with torch.no_grad():
            for parameter, weight in zip(step.parameters, weights, strict=True):
                parameter.copy_(weight)
        gradients = [g.double() for g in mean_gradients(step, [inputs])]
        norm = math.sqrt(sum(float(value) ** 2 for g in gradients for value in g.flatten()))
        clip = min(1.0, SETTINGS.clip_norm / norm)
        for i, gradient in enumerate(gradients):
            decay = SETTINGS.weight_decay if gradient.ndim == 2 else 0.0
            first[i] = beta1 * first[i] + (1 - beta1) * clip * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * (clip * gradient) ** 2
            mean = first[i] / (1 - beta1**number)
            spread = second[i] / (1 - beta2**number)
            weights[i] = weights[i] - lr * (mean / (spread.sqrt() + eps) + decay * weights[i])
        yield [w.clone() for w in weights], norm


def test_updates_are_those_of_a_reference_adamw_with_clip_decay_and_schedule() -> None:
    batches = [batch(seed) for seed in range(6)]
    schedule = Cosine(peak=1e-2, floor=1e-3, warmup_steps=2, num_steps=6)
    rates = [schedule.at(number) for number in range(6)]
    step = make_step()
    expected = adamw_by_hand(make_step(), batches, rates)
    for number in range(6):
        weights, norm = next(expected)
        load(step, batches[number])
        step.parts["normal"]()
        step.totals.zero()
        step.set_lr(rates[number])
        step.parts["update"]()
        assert averages(step.totals.sums).grad_norm == pytest.approx(norm, rel=1e-4)
        for parameter, weight in zip(step.parameters, weights, strict=True):
            # a step moves by 1e-2; Adam divides small gradients by their own size, so that
            # rounding of tiny ones is seen: 1 % of a step
            torch.testing.assert_close(parameter.double(), weight, rtol=0, atol=1e-4)
    assert float(step.moments()["step"]) == 6


def test_only_matrices_decay() -> None:
    """With no gradient at all, AdamW only decays."""
    nothing = batch(1)._replace(loss_mask_T=torch.zeros(48, dtype=torch.bool))
    step = make_step(nothing)
    before = snapshot(step)
    step.set_lr(0.5)
    step.parts["normal"]()
    step.parts["update"]()
    for name, parameter in step.masters.items():
        shrunk = before[name] * (1 - 0.5 * SETTINGS.weight_decay) if parameter.ndim == 2 else None
        torch.testing.assert_close(parameter, before[name] if shrunk is None else shrunk)


def test_small_gradients_are_not_clipped() -> None:
    step, free = make_step(batch(1)), make_step(batch(1), settings=wide_clip())
    for one in (step, free):
        one.parts["normal"]()
        one.set_lr(1e-3)
        one.parts["update"]()
    clipped, unclipped = step.moments(), free.moments()
    norm = averages(free.totals.sums).grad_norm
    assert norm is not None
    assert norm > SETTINGS.clip_norm
    name = next(name for name in clipped if name.startswith("exp_avg.") and "fc" in name)
    torch.testing.assert_close(clipped[name] * norm / SETTINGS.clip_norm, unclipped[name])


def wide_clip() -> "type(SETTINGS)":
    return type(SETTINGS)(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1e9)


def test_a_rehearsal_leaves_every_bit_as_it_was() -> None:
    step = make_step(batch(1))
    step.parts["metric"]()
    step.set_lr(1e-2)
    step.parts["update"]()
    before = snapshot(step)
    load(step, batch(2))
    with step.rehearsal():
        for _ in range(2):
            for part in step.parts.values():
                part()
    assert_untouched(before, snapshot(step))
    assert float(step.totals.sums.abs().sum()) > 0
    assert all(parameter.grad is None for parameter in step.parameters)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_moves_nothing_and_names_step_and_documents(bad: float) -> None:
    poisoned = batch(2)
    poisoned.features_TC[3, 0] = bad
    step = make_step(batch(1))
    step.set_lr(1e-2)
    step.parts["normal"]()
    step.parts["update"]()
    saved = [Path("step-00000004")]
    sentinel = Sentinel(lambda row: f"chats:{row}", newest=lambda: saved[0])
    sentinel.watch(6, step.blocked, [facts(1, rows=(1, 2))])
    before = snapshot(step)
    load(step, poisoned)
    step.parts["normal"]()
    step.parts["update"]()
    after = snapshot(step)
    assert_untouched({n: before[n] for n in [*step.masters, *step.moments()]}, after)
    with pytest.raises(NonFiniteError, match=r"step 7: .* chats:3, chats:9\n") as caught:
        sentinel.watch(7, step.blocked, [facts(2, rows=(3, 9, 3))])
    assert caught.value.exit_code == 10
    assert caught.value.hint.startswith("the last checkpoint is step-00000004 (if going on")


def test_a_gradient_that_is_not_finite_moves_nothing_though_the_loss_is() -> None:
    step = make_step(batch(1))
    step.parts["normal"]()
    assert step.parameters[0].grad is not None
    step.parameters[0].grad.view(-1)[0] = float("inf")
    before = snapshot(step)
    step.parts["update"]()
    assert_untouched({n: before[n] for n in [*step.masters, *step.moments()]}, snapshot(step))
    assert float(step.blocked) == 1


def test_after_a_step_that_was_not_finite_no_other_moves_a_weight() -> None:
    """The host learns of it a few steps late on a GPU."""
    poisoned = batch(2)
    poisoned.features_TC[3, 0] = float("nan")
    step = make_step()
    before = snapshot(step)
    for inputs in (poisoned, batch(1)):
        load(step, inputs)
        step.set_lr(1e-2)
        step.parts["normal"]()
        step.parts["update"]()
    assert_untouched({n: before[n] for n in [*step.masters, *step.moments()]}, snapshot(step))


def test_of_many_documents_a_few_are_named_and_the_rest_counted() -> None:
    sentinel = Sentinel(str, newest=lambda: None)
    many = facts(1, rows=tuple(range(100, 100 + NAMED_ROWS + 5)))
    with pytest.raises(NonFiniteError, match=r"100, 101, .* and 5 more\n") as caught:
        sentinel.watch(1, torch.ones(()), [many])
    assert caught.value.hint.startswith("there is no checkpoint yet; look at")


def facts(number: int, *, rows: tuple[int, ...]) -> BatchFacts:
    return BatchFacts(
        number=number,
        num_real_tokens=40,
        num_supervised_tokens=30,
        num_documents=len(rows),
        rows=rows,
    )


def test_the_state_of_the_optimizer_goes_into_another_step() -> None:
    one, other = make_step(batch(1)), make_step()
    one.set_lr(1e-2)
    one.parts["normal"]()
    one.parts["update"]()
    other.load(one.masters, {name: tensor.clone() for name, tensor in one.moments().items()})
    for step in (one, other):
        load(step, batch(2))
        step.set_lr(1e-2)
        step.parts["normal"]()
        step.parts["update"]()
    assert_untouched({**one.masters, **one.moments()}, {**other.masters, **other.moments()})
    assert float(other.moments()["step"]) == 2.0
