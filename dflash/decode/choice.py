"""The target's choice of the next tokens, and how many drafts it confirms."""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in the published decoder (z-lab ``dflash/model.py``)."""


def drawn(logits_BV: Tensor, *, temperature: float | Tensor, races_BV: Tensor) -> Tensor:
    """Return int64 [B]: one draw a row. *races_BV* are draws from Exp(1), fresh for every call.

    argmax of p / Exp(1) is a draw from p: one kernel, no host sync, the caller's generator.
    """
    probabilities_BV = torch.softmax(logits_BV.float() / temperature, dim=-1)
    return (probabilities_BV / races_BV).argmax(dim=-1)


def agreeing(block_B: Tensor, choice_B: Tensor) -> Tensor:
    """Return int64 [1]: how many drafts, from the first on, the target chose itself.

    Args:
        block_B: the anchor, then the drafts.
        choice_B: what the target chose after each of them.
    """
    return (block_B[1:] == choice_B[:-1]).cumprod(0).sum().view(1)
