"""The weights that a drafter starts with."""

from dataclasses import replace

import pytest
import torch
from drafter_cases import TINY

from dflash.drafter.model import Drafter


def test_a_drafter_is_nan_until_it_is_initialised() -> None:
    assert all(parameter.isnan().all() for parameter in Drafter(TINY).parameters())


def test_initialising_draws_the_same_weights_for_the_same_seed_only() -> None:
    drafters = [Drafter(replace(TINY, hidden_size=256, attention_bias=True)) for _ in range(3)]
    for drafter, seed in zip(drafters, (1, 1, 2), strict=True):
        drafter.initialise(seed)
    first, again, other = (drafter.state_dict() for drafter in drafters)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert (first["layers.1.self_attn.k_norm.weight"] == 1).all()
    assert (first["layers.1.self_attn.k_proj.bias"] == 0).all()


def test_weights_do_not_depend_on_how_many_threads_draw_and_no_two_matrices_are_alike() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            drafter = Drafter(TINY)
            drafter.initialise(5)
            found.append(drafter.state_dict())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    starts = [w.flatten()[:8].tolist() for w in found[0].values() if w.ndim == 2]
    assert len({tuple(start) for start in starts}) == len(starts)


@pytest.mark.parametrize(("hidden_size", "std"), [(256, 0.08), (1024, 0.04), (8192, 0.02)])
def test_narrow_drafters_start_with_wider_weights(hidden_size: int, std: float) -> None:
    shape = replace(TINY, hidden_size=hidden_size, num_layers=1, intermediate_size=64)
    drafter = Drafter(shape)
    drafter.initialise(0)
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight"):
        assert drafter.state_dict()[name].std().item() == pytest.approx(std, rel=0.02)


def test_initialising_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Drafter(TINY).initialise(3)
    assert torch.equal(torch.get_rng_state(), before)
