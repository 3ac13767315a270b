"""Moving fp32 masters by bf16 gradients: torch's own AdamW on the masters is the judge."""

import pytest
import torch
from torch import nn

from dflash.train.adamw import AdamSettings, FusedAdamW, MasterAdamW, adamw_for

SETTINGS = AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_norm=1.0)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (6, 5), "vector": (7,), "wide": (3, 40)}
    return {
        name: nn.Parameter(torch.empty(shape).normal_(generator=random))
        for name, shape in shapes.items()
    }


def gradients(step: int, named: dict[str, nn.Parameter]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [
        torch.empty(p.shape).normal_(generator=random).to(torch.bfloat16) for p in named.values()
    ]


def reference(named: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    matrices = [p for p in named.values() if p.ndim == 2]
    vectors = [p for p in named.values() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )


def test_masters_follow_torchs_adamw_and_weights_are_their_rounded_copies() -> None:
    named, judged = parameters(), parameters()
    adam, torch_adam = adamw_for(named, SETTINGS, compute=torch.bfloat16), reference(judged)
    assert isinstance(adam, MasterAdamW)
    adam.lr.fill_(1e-2)
    for step in range(20):
        grads = gradients(step, judged)
        adam.divisor.fill_(2.0 + step)
        adam.move(grads)
        for parameter, grad in zip(judged.values(), grads, strict=True):
            parameter.grad = grad.float() / (2.0 + step)
        torch_adam.step()
    for name, master in adam.masters.items():
        torch.testing.assert_close(master, judged[name].detach(), rtol=1e-5, atol=1e-6)
        assert named[name].dtype == torch.bfloat16
        assert torch.equal(named[name].detach(), master.to(torch.bfloat16))
    assert float(adam.step_count) == 20


def test_steps_too_small_for_bf16_still_add_up() -> None:
    """A bf16 weight of 1 cannot move by 1e-4; its master does, and takes the weight along."""
    named = {"vector": nn.Parameter(torch.ones(4))}
    adam = adamw_for(named, SETTINGS, compute=torch.bfloat16)
    adam.lr.fill_(1e-4)
    for _ in range(100):
        adam.move([torch.ones(4, dtype=torch.bfloat16)])
    assert adam.masters["vector"].tolist() == pytest.approx([0.99] * 4, abs=1e-4)
    assert named["vector"].tolist() == pytest.approx([0.99] * 4, abs=4e-3)
    assert named["vector"].tolist()[0] != 1.0


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_blocked_move_changes_nothing_even_with_gradients_that_are_not_finite(
    compute: torch.dtype,
) -> None:
    named = parameters()
    adam = adamw_for(named, SETTINGS, compute=compute)
    adam.lr.fill_(1e-2)
    dtype = torch.bfloat16 if compute == torch.bfloat16 else torch.float32
    adam.move([g.to(dtype) for g in gradients(0, named)])
    before = {n: t.clone() for n, t in {**adam.masters, **adam.moments()}.items()}
    weights = [p.detach().clone() for p in named.values()]
    adam.blocked.fill_(1.0)
    adam.move([torch.full(p.shape, torch.nan, dtype=dtype) for p in named.values()])
    for name, tensor in {**adam.masters, **adam.moments()}.items():
        assert torch.equal(tensor, before[name]), name
    assert all(torch.equal(p.detach(), w) for p, w in zip(named.values(), weights, strict=True))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_is_loaded_goes_on_as_if_it_had_never_stopped(compute: torch.dtype) -> None:
    ran, resumed = parameters(), parameters(seed=5)
    one = adamw_for(ran, SETTINGS, compute=compute)
    other = adamw_for(resumed, SETTINGS, compute=compute)
    dtype = torch.bfloat16 if compute == torch.bfloat16 else torch.float32
    for adam in (one, other):
        adam.lr.fill_(1e-2)
    for step in range(3):
        one.move([g.to(dtype) for g in gradients(step, ran)])
    other.load(one.masters, one.moments())
    assert all(torch.equal(resumed[n].detach(), ran[n].detach()) for n in ran)
    for adam, named in ((one, ran), (other, resumed)):
        adam.move([g.to(dtype) for g in gradients(3, named)])
    for name in ran:
        assert torch.equal(one.masters[name], other.masters[name])
        assert torch.equal(ran[name].detach(), resumed[name].detach())
    assert {float(t) for n, t in other.moments().items() if n == "step"} == {4.0}


def test_fp32_parameters_are_their_own_masters() -> None:
    named = parameters()
    adam = adamw_for(named, SETTINGS, compute=torch.float32)
    assert isinstance(adam, FusedAdamW)
    assert all(adam.masters[n].data_ptr() == p.data_ptr() for n, p in named.items())


def test_casting_makes_no_second_fp32_copy() -> None:
    named = parameters()
    addresses = {n: p.data_ptr() for n, p in named.items()}
    adam = adamw_for(named, SETTINGS, compute=torch.bfloat16)
    assert {n: m.data_ptr() for n, m in adam.masters.items()} == addresses
