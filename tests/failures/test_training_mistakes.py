"""What the pages of silent training mistakes say beyond their own number."""

import torch

from dflash.failures import frozen_bf16
from dflash.failures._example import packed_batch, small_loss


def test_torch_s_own_adamw_freezes_bf16_norms_as_the_page_says() -> None:
    """The page takes the masters away from our optimizer; this is what everybody else uses."""
    dtype = torch.bfloat16
    loss = small_loss(num_anchors=16, seed=0, dtype=dtype)
    loss.drafter.to(dtype)
    norms = [weight for weight in loss.drafter.parameters() if weight.ndim == 1]
    before = [weight.detach().clone() for weight in norms]
    optimizer = torch.optim.AdamW(loss.drafter.parameters(), lr=frozen_bf16.LR, weight_decay=0.0)
    inputs = packed_batch(frozen_bf16.LENGTHS, seed=0, dtype=dtype)
    for _ in range(frozen_bf16.NUM_STEPS):
        objective = loss(inputs, with_metrics=False)
        (objective.loss_sum / objective.weight_sum).backward()
        optimizer.step()
        assert all(weight.grad is not None and weight.grad.any() for weight in norms)
        optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(norms, before, strict=True))


def test_a_move_of_six_hundred_thousandths_leaves_a_bf16_weight_of_a_fiftieth() -> None:
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 6e-5 == weight
    assert weight - 7e-5 != weight
