"""Prompts, a drafter that knows the text, and the target's own text from transformers."""

from typing import TYPE_CHECKING

import torch
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dflash.drafter.model import ContextCache, Drafter

if TYPE_CHECKING:
    from dflash.target.model import Target

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 3, 3, 12, 60, 7]]


class Forecaster(Drafter):
    """A drafter that knows the text and is wrong in some slots: accepts of every length."""

    def knows(self, target: "Target", text: list[int], wrong_every: int) -> "Forecaster":
        self.target, self.text, self.wrong_every = target, text, wrong_every
        self.drafted = 0
        return self

    def draft(self, embeds_bBD: Tensor, positions_bB: Tensor, cache: ContextCache) -> Tensor:  # noqa: ARG002
        directions_VD = F.normalize(self.target.lm_head_VD, dim=-1)
        rows = []
        for position in positions_bB[0].tolist():
            self.drafted += 1
            token = self.text[min(position, len(self.text) - 1)]
            if self.drafted % self.wrong_every == 0:
                token = (token + 1) % VOCAB
            rows.append(directions_VD[token] * 100)
        return torch.stack(rows)[None]


class Watched(Drafter):
    """A drafter that keeps what each block came out as, and for which positions."""

    def draft(self, embeds_bBD: Tensor, positions_bB: Tensor, cache: ContextCache) -> Tensor:
        out = super().draft(embeds_bBD, positions_bB, cache)
        self.__dict__.setdefault("seen", []).append((positions_bB[0].tolist(), out[0]))
        return out


def own_text(target: "Target", prompt: list[int], max_new_tokens: int) -> list[int]:
    """The target's own greedy text, from transformers."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    text: list[int] = out[0, len(prompt) :].tolist()
    return text
