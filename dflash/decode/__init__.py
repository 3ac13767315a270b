"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward.

Lossless by construction: every token that is committed was chosen by the target itself, greedily
or by sampling, given the tokens before it; the drafter only decides how many of these choices one
target forward yields. In fp32 the greedy output equals the target's own, token for token; in bf16
the verifying forward has another shape than a one-token forward, so a near-tie may flip.

``plain_decode`` is the same loop with a block of one token, so that the two can be compared. Both
run eagerly on a CPU and as replays of captured CUDA graphs on a GPU (``Replays``).

Letters as in dflash.drafter: B slots of a block, P prompt tokens, D hidden, C features, V words;
and S rows of a static cache.
"""

from dflash.decode.answer import Decoded, DecodeLimits, DecodeLoop, OnBlock, answer_room
from dflash.decode.loop import plain_decode, speculative_decode
from dflash.decode.replays import Replays, static_bytes

__all__ = [
    "DecodeLimits",
    "DecodeLoop",
    "Decoded",
    "OnBlock",
    "Replays",
    "answer_room",
    "plain_decode",
    "speculative_decode",
    "static_bytes",
]
