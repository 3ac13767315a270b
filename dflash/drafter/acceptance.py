"""How many tokens a verify step would commit, given which slots are right."""

import torch
from torch import Tensor


def accepted_lengths(correct_NB: Tensor, weight_NB: Tensor) -> Tensor:
    """Return int64 [N]: one bonus token plus the unbroken prefix of right, supervised slots.

    Slot 0 is the anchor and does not count. This is the true prefix of each block, never a product
    of per-slot accuracies.

    Args:
        correct_NB: bool, True where the drafted token equals the label.
        weight_NB: bool, True where the slot is supervised; the first False ends the prefix.
    """
    right_NB = (correct_NB & weight_NB)[:, 1:].to(torch.int64)
    return 1 + right_NB.cumprod(dim=1).sum(dim=1)
