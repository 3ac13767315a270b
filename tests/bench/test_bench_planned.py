"""The memory plan as the cases ask it: the sizes are the real ones, and so are the peaks."""

from dataclasses import replace

import pytest
import torch
from bench_cases import TINY, measured_apart, setting

from dflash.drafter.masks import num_anchors_for
from dflash.target.sizes import sizes_of as counted
from dflash_bench.cases import all_cases
from dflash_bench.planned import (
    decode_gib,
    density_of,
    drafter_step_gib,
    pipeline_gib,
    plans_gib,
    target_gib,
    target_sizes,
)
from dflash_bench.random_target import random_target
from dflash_bench.shape_files import shape_names
from dflash_bench.shapes import named_shape
from dflash_bench.steps import make_step, make_tables

CPU = torch.device("cpu")
GIB = 2**30


def test_the_targets_sizes_are_those_of_the_target_that_is_made() -> None:
    target = random_target(TINY, device=CPU, dtype=torch.float32, seed=0)
    wanted = counted(target.model, taps=target.taps)
    found = target_sizes(TINY)
    for name in ("taps", "num_parameters", "tables", "vocab_size", "hidden_size"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.forward_width == wanted.forward_width


@pytest.mark.parametrize("name", shape_names())
def test_a_density_gives_the_shapes_own_anchors(name: str) -> None:
    shape = named_shape(name)
    size = shape.drafter.block_size
    assert num_anchors_for(shape.token_budget, density_of(shape), size) == shape.num_anchors
    more = shape.num_anchors + 128 // size
    changed = shape.with_(num_anchors=more)
    assert num_anchors_for(shape.token_budget, density_of(changed), size) == more


def test_the_plan_holds_at_least_what_a_step_allocates_before_it_runs() -> None:
    tables = make_tables(TINY, device=CPU)
    step = make_step(TINY, device=CPU, tables=tables)
    weights = sum(parameter.nbytes for parameter in step.loss.drafter.parameters())
    batch = sum(tensor.nbytes for tensor in step.batch)
    kept = 3 * weights + 2 * batch + sum(table.nbytes for table in tables)  # with both moments
    assert drafter_step_gib(setting("eager")) * GIB > kept


def test_drafters_on_one_device_share_the_tables_alone() -> None:
    one, two, three = (
        drafter_step_gib(setting("eager", devices=("cpu",) * count)) for count in (1, 2, 3)
    )
    assert three - two == pytest.approx(two - one)
    tables = 2 * 512 * 128 * 4 / GIB
    assert two == pytest.approx(2 * one - tables)


def test_the_whole_forward_also_holds_logits_and_the_plain_one_a_mask() -> None:
    needs = {mode: target_gib(setting(mode)) for mode in all_cases()["target-forward"].modes}
    logits, mask = 256 * 512 * 4 / GIB, 256**2 * (1 + 4) / GIB
    assert needs["whole-packed"] - needs["stopped-packed"] == pytest.approx(logits)
    assert needs["stopped-dense"] - needs["stopped-packed"] == pytest.approx(mask)


def test_two_devices_have_a_plan_each() -> None:
    apart = setting("graphed", devices=("cuda:1",), target_device="cuda:0")
    plans = plans_gib(apart)
    assert set(plans) == {"cuda:0", "cuda:1"}
    assert plans["cuda:1"] < pipeline_gib(apart)  # the slot that is kept for the drafter alone
    together = replace(apart, target_device="cuda:1")
    assert pipeline_gib(apart) < pipeline_gib(together)


def test_decoding_holds_both_models_and_the_rows_of_a_text() -> None:
    one, longer = (decode_gib(setting("plain"), num_tokens=tokens) for tokens in (100, 200))
    parameters = target_sizes(TINY).num_parameters + TINY.drafter.num_parameters
    assert one * GIB > 4 * parameters
    rows = 2 * 4 * 128 * 2 * 32 * (6 + 2)  # 128 rows more of keys and values, 2 heads of 32
    assert (longer - one) * GIB == pytest.approx(rows)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["eager", "compiled", "graphed"])
@pytest.mark.parametrize(
    ("shape", "drafters"), [("smollm2", 1), ("smollm2", 3), ("qwen3-8b-3072", 1), ("packed-24k", 1)]
)
def test_the_plan_is_within_a_tenth_of_the_peak_of_a_drafter_step(
    shape: str, drafters: int, mode: str
) -> None:
    asked = setting(
        mode,
        shape=named_shape(shape),
        devices=("cuda:0",) * drafters,
        target_device="cuda:0",
        turn_steps=2,
    )
    child = measured_apart("drafter-step", asked)
    assert child.failure is None
    peak = child.facts["memory"].peak_allocated_gib
    assert drafter_step_gib(asked) == pytest.approx(peak, rel=0.1)
