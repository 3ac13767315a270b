"""The named shapes that cases run at."""

from dataclasses import dataclass

from dflash.drafter.shape import DrafterShape


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

SHAPES = {
    "tiny": BenchShape(drafter=_TINY, token_budget=256, num_anchors=32, num_documents=2),
    # 3072 context tokens, 512 anchors of 16: what rivals' recipes use, batch 1
    "qwen3-8b-3072": BenchShape(
        drafter=_QWEN3_8B, token_budget=3072, num_anchors=512, num_documents=1
    ),
    "qwen3-8b-packed-24k": BenchShape(
        drafter=_QWEN3_8B, token_budget=24576, num_anchors=4096, num_documents=8
    ),
}
