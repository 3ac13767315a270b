"""Prompts, a drafter that knows the text, and the target's own text from transformers."""

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

import torch
import transformers
from tiny_models import SIZES, VOCAB, tiny_drafter, tiny_target
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dflash.decode import Decoded, DecodeLimits
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


AS_THE_TARGET = 0.09
"""Total variation: a right decoder is at about 0.05 with so many draws, uniform text at 0.5."""


def distance_from_the_target(decode: Callable[..., Decoded], *, seed: int) -> float:
    """How far the second and third sampled token are from their exact joint distribution."""
    words, num_draws = 5, 600
    config = transformers.LlamaConfig(
        **(SIZES | {"vocab_size": words, "num_hidden_layers": 3, "initializer_range": 0.15})
    )
    target = tiny_target(config)
    drafter = tiny_drafter(vocab_size=words, mask_token_id=words - 1, block_size=4)
    exact = torch.zeros(words, words, words)
    with torch.no_grad():
        for triple in product(range(words), repeat=3):
            logits = target.model(torch.tensor([[0, 1, *triple]])).logits[0, 1:4]
            chances = torch.softmax(logits / 0.8, dim=-1)
            exact[triple] = chances[torch.arange(3), list(triple)].prod()
    torch.testing.assert_close(exact.sum(), torch.tensor(1.0))
    counts = torch.zeros_like(exact)
    generator = torch.Generator().manual_seed(seed)
    limits = DecodeLimits(max_new_tokens=3, temperature=0.8)
    for _ in range(num_draws):
        decoded = decode(target, drafter, [0, 1], limits=limits, generator=generator)
        counts[tuple(decoded.tokens)] += 1
    pairs = exact.sum(0) - counts.sum(0) / num_draws
    return float(pairs.abs().sum() / 2)
