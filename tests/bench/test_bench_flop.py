"""The work of a step, against the literature's figures, torch's own counter and a dense mask."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash.drafter.anchors import anchor_scores, draw_anchors
from dflash.drafter.masks import dense_mask
from dflash_bench.flop import step_flop, visible_pairs
from dflash_bench.shape_files import shape_names
from dflash_bench.shapes import named_shape
from dflash_bench.steps import make_step, random_inputs

CPU = torch.device("cpu")


def test_shape_a_is_worth_the_published_73_teraflop() -> None:
    flop = step_flop(named_shape("qwen3-8b-3072"))
    assert flop.model / 1e12 == pytest.approx(73.3, abs=0.1)
    assert flop.layers / 1e12 == pytest.approx(47.5, abs=0.1)
    assert (flop.lm_head + flop.lm_head_slot_0) / 1e12 == pytest.approx(20.4, abs=0.1)
    assert (flop.context + flop.features_dx) / 1e12 == pytest.approx(2.3, abs=0.1)
    assert flop.attention / 1e12 == pytest.approx(3.1, abs=0.1)


@pytest.mark.parametrize("change", [{}, {"num_kv_heads": 4, "block_size": 4}, {"num_layers": 3}])
def test_the_products_that_a_step_needs_are_those_that_it_runs(change: dict[str, int]) -> None:
    shape = named_shape("tiny")
    shape = replace(shape, drafter=replace(shape.drafter, **change))
    step = make_step(shape, device=CPU)
    with FlopCounterMode(display=False) as counter:
        step.parts["normal"]()
    of_step = counter.get_flop_counts()["Global"]
    flop = step_flop(shape)
    # Attention is batched products (bmm) on a CPU; everything else is plain ones.
    assert of_step[torch.ops.aten.mm] == flop.needed - flop.attention


def test_the_pairs_that_attention_counts_are_those_of_the_mask() -> None:
    shape = named_shape("tiny")
    inputs = random_inputs(
        shape, device=CPU, dtype=torch.float32, generator=torch.Generator().manual_seed(0)
    )
    seen = []
    for number in range(200):
        anchors = draw_anchors(
            inputs.loss_mask_T,
            inputs.documents_T,
            inputs.positions_T,
            scores_T=anchor_scores(0, number, num_positions=shape.token_budget, device=CPU),
            num_anchors=shape.num_anchors,
        )
        mask = dense_mask(anchors, inputs.documents_T, block_size=shape.drafter.block_size)
        seen.append(int(mask.sum()))
    # 200 means over 32 anchors of a spread of 36 positions: half a percent is four deviations.
    assert visible_pairs(shape) == pytest.approx(sum(seen) / len(seen), rel=0.005)


def test_every_large_shape_fits_the_tiles_and_has_the_density_of_shape_a() -> None:
    for name in shape_names():
        shape = named_shape(name)
        assert shape.token_budget % 128 == 0, name
        assert shape.num_anchors * shape.drafter.block_size % 128 == 0, name
        assert shape.token_budget % shape.num_documents == 0, name
        if name != "tiny":
            density = shape.num_anchors / shape.token_budget
            assert density == pytest.approx(1 / 6, rel=0.01), name
        if "packed" in name:
            assert shape.num_documents >= 8, name
    assert named_shape("packed-49k").token_budget == 49152
