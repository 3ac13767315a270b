"""The drafter's side: its context, and the block it would go on with."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name torch itself uses)

from dflash.drafter.model import ContextCache, Drafter

if TYPE_CHECKING:
    from dflash.target.model import Target


def compute_dtype(target: "Target") -> torch.dtype:
    """The drafter's activations: fp16 overflows where features are fused (spec, gotcha 10)."""
    return torch.bfloat16 if target.dtype == torch.float16 else target.dtype


class Proposer:
    """Proposes blocks from a context cache, which is growing or static; it counts nothing."""

    def __init__(self, target: "Target", drafter: Drafter, cache: ContextCache) -> None:
        shape = drafter.shape
        self._dtype = compute_dtype(target)
        self._target = target
        self._drafter = drafter
        self._cache = cache
        self._masks_B = torch.full(
            (shape.block_size - 1,), shape.mask_token_id, device=torch.device(target.device)
        )

    def extend(self, features_PC: Tensor, positions_P: Tensor) -> None:
        """Give the drafter the features of further tokens."""
        features_PC = features_PC.to(self._dtype)
        self._drafter.extend_context(self._cache, features_PC[None], positions_P[None])

    def block(self, anchor_1: Tensor, positions_B: Tensor) -> Tensor:
        """int64 [B]: the anchor, then the drafter's greedy guess for the B - 1 tokens after it."""
        ids_B = torch.cat([anchor_1, self._masks_B])
        embeds_BD = F.embedding(ids_B, self._target.embedding_VD).to(self._dtype)
        hidden_BD = self._drafter.draft(embeds_BD[None], positions_B[None], self._cache)[0]
        head_VD = self._target.lm_head_VD
        drafts = F.linear(hidden_BD[1:].to(head_VD.dtype), head_VD).argmax(dim=-1)
        return torch.cat([anchor_1, drafts])
