"""Batches whose number of real tokens varies from step to step: a few fixed lengths, one order."""

import random

from dflash.drafter.masks import TILE

NUM_LENGTHS = 3
"""Enough for allocator and graphs to show; a naive mode compiles for each, half a minute at 8B."""

SHORTEST_SHARE = 0.35
CPU_STEP = 8
"""Positions; a GPU's attention wants whole tiles."""


def batch_lengths(token_budget: int, *, on_gpu: bool) -> tuple[int, ...]:
    """Return ``NUM_LENGTHS`` lengths, evenly from ``SHORTEST_SHARE`` of T up to T; ascending.

    Fewer where T has no room for as many that are different.
    """
    step = TILE if on_gpu else CPU_STEP
    shares = (
        SHORTEST_SHARE + (1 - SHORTEST_SHARE) * number / (NUM_LENGTHS - 1)
        for number in range(NUM_LENGTHS)
    )
    return tuple(sorted({max(step, round(share * token_budget / step) * step) for share in shares}))


def length_of_step(number: int, lengths: tuple[int, ...], *, seed: int) -> int:
    """Return the length of the batch of step *number*: every length once in a round, shuffled."""
    round_number, place = divmod(number, len(lengths))
    order = random.Random(seed * 1_000_003 + round_number)
    return order.sample(lengths, len(lengths))[place]
