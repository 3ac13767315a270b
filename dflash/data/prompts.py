"""Prompts for measuring acceptance, taken from prepared rows."""

from dflash.data.shards import TokenDataset
from dflash.data.shuffle import random_order
from dflash.errors import DataError

TEXT_PROMPT_TOKENS = 64


def heldout_prompts(dataset: TokenDataset, *, num_prompts: int, seed: int) -> list[list[int]]:
    """Draw prompts from *num_prompts* different rows; fewer when there are fewer rows.

    A prompt is what precedes the first supervised token. A row that is supervised from its start
    gives its first min(64, half) tokens.
    """
    if len(dataset) == 0:
        raise DataError(f"{dataset.folder}: no rows to take prompts from")
    order = random_order(len(dataset), seed=seed, stream=0)[:num_prompts]
    return [_prompt(dataset, index) for index in order.tolist()]


def _prompt(dataset: TokenDataset, index: int) -> list[int]:
    tokens, loss_mask = dataset.row(index)
    first = int(loss_mask.argmax())
    stop = first or min(TEXT_PROMPT_TOKENS, len(tokens) // 2)
    return [int(token) for token in tokens[:stop]]
