"""The cases that are no training step: that they measure what they say, and that it is right."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import TINY, measured, measured_apart, setting

from dflash.drafter.objective import ObjectiveSettings
from dflash_bench.cases import all_cases
from dflash_bench.cases._case import Lengths
from dflash_bench.cases._repeated import Repeated, Run, Work
from dflash_bench.cases.mask import batch_anchors
from dflash_bench.cases.objective import full_logits_loss
from dflash_bench.cases.packing import document_lengths, pack_in_order
from dflash_bench.cases.target_forward import Batch, features_function, forward_flop
from dflash_bench.documents import document_bounds, places
from dflash_bench.random_target import random_target

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("case", "mode"),
    [("mask", "launched"), ("packing", "best-fit"), ("objective", "chunked")],
)
def test_timed_steps_start_up_and_memory_are_told_apart(case: str, mode: str) -> None:
    times_ms, facts = measured(case, setting(mode))
    assert len(times_ms) == 2 * 3
    assert min(times_ms) > 0
    assert len(facts["first_steps_ms"]) == 8
    assert facts["memory"].rss_gib > 0
    assert facts["memory"].peak_allocated_gib is None
    assert facts["graphs"].recompiles == 0


def compiling_late(steps: list[int]) -> Repeated:
    """Compiles something new in each of *steps*, two at most."""
    torch.compiler.reset()
    functions = dict(zip(steps, (lambda x: x.sin(), lambda x: x.cos()), strict=False))

    def make_ready() -> Run:
        def run(number: int) -> None:
            if number in functions:
                torch.compile(functions[number], backend="eager")(torch.ones(2))

        return run

    work = Work(make_ready=make_ready, device=CPU, units=lambda _number: 1.0)
    return Repeated(setting("launched"), lambda _setting: work)


@pytest.mark.parametrize(("steps", "told"), [([0, 3], ""), ([3, 10], "still compiled (1)")])
def test_what_goes_on_in_timed_steps_is_told_from_the_first_turn_on(
    steps: list[int], told: str
) -> None:
    subject = compiling_late(steps)
    early = {**subject.build(), **subject.prepare()}
    subject.settle()
    subject.turn()
    found = subject.so_far()
    assert told in found["unsettled"]
    assert bool(found["unsettled"]) == bool(told)
    assert found["compile_s"] > early["compile_s"]


def test_a_subject_that_begins_again_makes_the_steps_of_its_first_turn() -> None:
    asked = setting("stopped-dense", lengths="variable")
    subject: Any = all_cases()["target-forward"].make(asked)
    subject.build()
    subject.prepare()
    subject.settle()
    subject.turn()
    subject.turn()
    subject.restart()
    subject.turn()
    units = subject.so_far()["units"]
    assert units[6:9] == units[:3] != units[3:6]


@pytest.mark.parametrize("case", ["mask", "target-forward", "packing", "objective"])
def test_any_seed_is_one(case: str) -> None:
    mode = all_cases()[case].modes[0]
    times_ms, _ = measured(case, setting(mode, seed=2**63 - 1), num_turns=1)
    assert len(times_ms) == 3


def test_a_baseline_is_the_first_mode_of_every_case() -> None:
    firsts = {name: case.modes[0] for name, case in all_cases().items()}
    assert firsts == {
        "drafter-step": "eager",
        "target-forward": "whole-dense",
        "pipeline": "eager",
        "decode": "plain",
        "mask": "launched",
        "objective": "full-logits",
        "packing": "in-order",
    }


@pytest.mark.parametrize(
    ("case", "mode"),
    [("mask", "captured"), ("mask", "captured-compiled"), ("decode", "captured")]
    + [("pipeline", mode) for mode in ("reduce-overhead", "warmed", "graphed")],
)
def test_what_only_a_gpu_can_do_says_so_beforehand(case: str, mode: str) -> None:
    assert "CUDA" in all_cases()[case].why_not(setting(mode))


@pytest.mark.parametrize("lengths", ["fixed", "variable"])
@pytest.mark.parametrize("budget", [256, 1024])  # the larger one also has tiles visible throughout
def test_the_masks_visited_tiles_are_those_with_a_readable_pair(
    lengths: Lengths, budget: int
) -> None:
    shape = TINY.with_(
        token_budget=budget, num_anchors=budget // 8, num_documents=512 // budget or 1
    )
    asked = setting("launched", lengths=lengths, shape=shape)
    _, facts = measured("mask", asked)
    anchors, starts_T = batch_anchors(asked, CPU)
    size = shape.drafter.block_size
    slots = shape.num_anchors * size
    readable = np.zeros((slots, budget + slots), dtype=bool)
    for block, (anchor, used) in enumerate(zip(*(one.tolist() for one in anchors), strict=True)):
        rows = slice(block * size, (block + 1) * size)
        if used:
            readable[rows, int(starts_T[anchor]) : anchor] = True
        readable[rows, budget + block * size : budget + (block + 1) * size] = True
    tiles = readable.reshape(slots // 128, 128, -1, 128).any(axis=(1, 3))
    assert facts["more"]["tiles visited"] == tiles.mean()
    assert facts["more"]["as launched"]
    assert (facts["more"]["block tokens"], facts["more"]["keys"]) == (budget, 2 * budget)


def test_in_order_opens_a_batch_where_the_next_document_does_not_fit() -> None:
    assert pack_in_order(np.array([4, 4, 4]), 10) == 2
    assert pack_in_order(np.array([10, 10]), 10) == 2
    assert pack_in_order(np.array([6, 5, 6, 5]), 10) == 4
    assert pack_in_order(np.array([1] * 25), 10) == 3


def test_fifty_thousand_documents_are_packed_fuller_than_in_order() -> None:
    asked = {mode: setting(mode, lengths="variable") for mode in ("in-order", "best-fit")}
    lengths = document_lengths(asked["best-fit"])
    assert len(lengths) == 50_000
    assert 100 < lengths.mean() < 128  # 256 at most, which cuts the longest
    assert 3 <= lengths.min() < 20
    assert lengths.max() == 256
    fill = {mode: measured("packing", one)[1]["more"]["fill"] for mode, one in asked.items()}
    least = math.ceil(lengths.sum() / 256)
    assert fill["best-fit"] <= lengths.sum() / (least * 256)
    assert fill["best-fit"] > 0.99 > fill["in-order"] > 0.5


def test_the_full_logits_loss_is_the_weighted_cross_entropy_of_slots_after_the_first() -> None:
    random = np.random.default_rng(0)
    hidden, head = random.normal(size=(6, 5)), random.normal(size=(7, 5))
    labels = random.integers(0, 7, (2, 3))
    loss, weights = 0.0, 0.0
    for block in range(2):
        for slot in (1, 2):
            logits = head @ hidden[block * 3 + slot]
            share = np.exp(logits)[labels[block, slot]] / np.exp(logits).sum()
            weight = math.exp(-(slot - 1) / 7.0)
            loss, weights = loss - weight * math.log(share), weights + weight
    found = full_logits_loss(
        torch.tensor(hidden, dtype=torch.float32),
        torch.tensor(head, dtype=torch.float32),
        torch.tensor(labels),
        settings=ObjectiveSettings(kind="decay", gamma=7.0),
    )
    assert float(found[0]) == pytest.approx(loss, rel=1e-5)
    assert float(found[1]) == pytest.approx(weights, rel=1e-6)


@pytest.mark.parametrize("chunk_blocks", [32, 5])
def test_chunks_and_full_logits_give_one_loss_and_one_gradient(chunk_blocks: int) -> None:
    shape = TINY.with_(objective=ObjectiveSettings(chunk_blocks=chunk_blocks))
    full, chunked = (
        measured("objective", setting(mode, shape=shape), num_turns=1)[1]
        for mode in ("full-logits", "chunked")
    )
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-6)
    norms = [facts["more"]["gradient norm"] for facts in (full, chunked)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert full["units"] == 32 * 7  # slot 0 is given


def test_an_objective_does_not_depend_on_lengths_and_8_bits_have_no_full_logits() -> None:
    why_not = all_cases()["objective"].why_not
    assert "N blocks" in why_not(setting("chunked", lengths="variable"))
    assert "bf16" in why_not(setting("full-logits", matmul="fp8"))
    assert why_not(setting("chunked", matmul="fp8")) == ""


@pytest.mark.parametrize("mode", all_cases()["target-forward"].modes)
def test_every_form_of_the_forward_gives_the_features_of_documents_run_alone(mode: str) -> None:
    asked = setting(mode, lengths="variable")
    target = random_target(TINY, device=CPU, dtype=torch.float32, seed=0)
    batch = Batch(asked, 0)
    features_TC = features_function(target, mode)(batch)
    assert len(batch.bounds) > 2
    for start, stop in zip(batch.bounds[:-1], batch.bounds[1:], strict=True):
        if start >= batch.num_real_tokens:
            break
        with torch.no_grad():
            alone = target.model(
                batch.tokens_T[None, start:stop], output_hidden_states=True, use_cache=False
            ).hidden_states
        taps = TINY.drafter.target_layer_ids
        wanted = torch.cat([alone[tap + 1][0] for tap in taps], dim=-1)
        torch.testing.assert_close(features_TC[start:stop], wanted, rtol=1e-4, atol=1e-4)


def test_the_forward_counts_real_tokens_and_says_how_far_it_is_from_production() -> None:
    times_ms, facts = measured("target-forward", setting("stopped-dense", lengths="variable"))
    bounds = [document_bounds(TINY, "variable", number, seed=0)[-1] for number in range(4)]
    assert facts["units"] == [bounds[n % 4] for n in (10, 11, 12, 15, 16, 17)]
    assert len(times_ms) == 6
    assert facts["padded"]
    assert facts["more"]["difference"] < 1e-5


def test_the_forwards_work_is_what_torch_counts_up_to_the_last_tap() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    target = random_target(TINY, device=CPU, dtype=torch.float32, seed=0)
    asked = setting("stopped-packed")
    batch = Batch(asked, 0)
    features = features_function(target, asked.mode)
    with FlopCounterMode(display=False) as counter:
        features(batch)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    heads, width = TINY.drafter.num_heads, TINY.drafter.head_dim
    causal = sum(2 * 2 * heads * width * (place + 1) for place in range(128)) * 2
    assert forward_flop(asked) == products + 4 * causal


@pytest.mark.parametrize("number", range(5))
def test_varying_documents_end_within_the_budget_and_differ_from_batch_to_batch(
    number: int,
) -> None:
    bounds = document_bounds(TINY, "variable", number, seed=0)
    assert bounds == document_bounds(TINY, "variable", number, seed=0)
    assert bounds != document_bounds(TINY, "variable", number + 1, seed=0)
    assert bounds[0] == 0
    assert int(0.7 * 256) <= bounds[-1] <= 256
    assert bounds == sorted(set(bounds))
    documents_T, positions_T = places(bounds, 256)
    for row in range(256):
        document = sum(row >= bound for bound in bounds[1:])
        real = row < bounds[-1]
        assert int(documents_T[row]) == (document if real else -1)
        assert int(positions_T[row]) == (row - bounds[document] if real else 0)


def test_fixed_documents_are_equal_and_fill_the_budget() -> None:
    assert document_bounds(TINY, "fixed", 3, seed=1) == [0, 128, 256]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (name, mode)
        for name in ("mask", "objective", "target-forward")
        for mode in all_cases()[name].modes
    ],
)
def test_every_mode_is_measured_on_a_gpu(case: str, mode: str) -> None:
    asked = setting(mode, devices=("cuda:0",), target_device="cuda:0")
    child = measured_apart(case, asked)
    assert child.failure is None
    assert min(child.turns[0]) > 0
    memory, more = child.facts["memory"], child.facts["more"]
    assert memory.peak_reserved_gib >= memory.peak_allocated_gib > 0
    assert more.get("as launched", True)
    assert more.get("difference", 0.0) < 0.05  # bf16, another kernel
    if mode.startswith("captured"):
        assert child.facts["graphs"].captured == 1
        assert memory.graph_pools_gib > 0
