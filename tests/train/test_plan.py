"""The memory plan's terms against what autograd really keeps."""

from dataclasses import replace

import torch
from drafter_cases import TINY

from dflash.drafter.attention import SplitMask, attend
from dflash.train.plan import dense_attention_bytes


def test_a_layer_of_dense_attention_keeps_what_the_plan_says() -> None:
    num_anchors, context, heads, width = 32, 256, TINY.num_heads, TINY.head_dim
    rows, groups = num_anchors * TINY.block_size, TINY.num_kv_heads
    query = torch.randn(1, heads, rows, width, requires_grad=True)
    key, value = (
        torch.randn(1, groups, context + rows, width, requires_grad=True) for _ in range(2)
    )
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Only what grows with rows x keys: the weights, not the queries, keys or the bool mask.
        if tensor.is_floating_point() and tensor.untyped_storage().nbytes() > query.nbytes * 4:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    mask = SplitMask(torch.ones(num_anchors, context, dtype=torch.bool), TINY.block_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(query, key, value, mask=mask, attention="split")
    one_more = replace(TINY, num_layers=TINY.num_layers + 1)
    fewer, more = (
        dense_attention_bytes(shape, num_anchors, context, checkpoint=False)
        for shape in (TINY, one_more)
    )
    assert more - fewer == sum(kept.values())
