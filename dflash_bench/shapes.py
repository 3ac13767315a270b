"""The named shapes that cases run at."""

from dataclasses import dataclass

from dflash.drafter.masks import num_anchors_for
from dflash.drafter.shape import DrafterShape

PAPER_DENSITY = 512 / 3072
"""Anchors per token of shape A, ``qwen3-8b-3072``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """A drafter and its packed batches: documents of equal length, all supervised."""

    drafter: DrafterShape
    token_budget: int
    num_anchors: int
    num_documents: int


_QWEN3_8B = DrafterShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    block_size=16,
    mask_token_id=151669,
    vocab_size=151936,
    rope_theta=1e6,
)
_TINY = DrafterShape(
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    block_size=8,
    mask_token_id=500,
    vocab_size=512,
    rope_theta=1e4,
)

# SmolLM2-135M-Instruct's drafter as configs/smollm2.toml makes it
_SMOLLM2 = DrafterShape(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    target_layer_ids=(1, 8, 14, 20, 27),
    num_target_layers=30,
    block_size=16,
    mask_token_id=4,
    vocab_size=49152,
    rope_theta=1e5,
)


def _at_paper_density(drafter: DrafterShape, token_budget: int, num_documents: int) -> BenchShape:
    return BenchShape(
        drafter=drafter,
        token_budget=token_budget,
        num_anchors=num_anchors_for(token_budget, PAPER_DENSITY, drafter.block_size),
        num_documents=num_documents,
    )


SHAPES = {
    "tiny": BenchShape(drafter=_TINY, token_budget=256, num_anchors=32, num_documents=2),
    # shape A: 3072 context tokens, 512 anchors of 16, what rivals' recipes use, batch 1
    "qwen3-8b-3072": _at_paper_density(_QWEN3_8B, 3072, 1),
    "qwen3-8b-packed-24k": _at_paper_density(_QWEN3_8B, 24576, 8),
    "qwen3-8b-packed-49k": _at_paper_density(_QWEN3_8B, 49152, 16),
    # conversations of some 250 tokens, as in docs/measurements/smollm2.md
    "smollm2-4096": _at_paper_density(_SMOLLM2, 4096, 16),
}
