"""The memory plan's terms against what autograd really keeps and what a step really holds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_cases import TINY
from torch import Tensor

from dflash.drafter.attention import SplitMask, attend
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.train.memory import dense_attention_bytes, layer_activation_bytes

WIDE = replace(
    TINY, hidden_size=64, intermediate_size=160, num_heads=4, num_kv_heads=2, head_dim=32
)
CONTEXT_ROWS, BLOCK_ROWS = 256, 512


def kept_by(forward: Callable[[], object], *, ours: Callable[[Tensor], bool]) -> int:
    """Bytes of all storages that *forward* keeps for its backward pass and *ours* counts."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if ours(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def kept_by_drafter(shape: DrafterShape, dtype: torch.dtype, *, fused: bool) -> int:
    """Fused: by the partition that every compiling backend makes, without generating code."""
    drafter = Drafter(shape)
    drafter.initialise(0)
    drafter.to(dtype)
    weights = {weight.data_ptr() for weight in drafter.parameters()}
    num_keys = CONTEXT_ROWS + BLOCK_ROWS
    embeds = torch.randn(1, BLOCK_ROWS, shape.hidden_size, dtype=dtype)
    features = torch.randn(1, CONTEXT_ROWS, shape.num_taps * shape.hidden_size, dtype=dtype)
    # A dense mask makes this attention repeat grouped keys, as flex attention does; it is no part
    # of what flex attention keeps.
    mask = torch.ones(BLOCK_ROWS, num_keys, dtype=torch.bool)

    def ours(tensor: Tensor) -> bool:
        is_mask = tensor.shape[-2:] == mask.shape
        return not is_mask and tensor.untyped_storage().data_ptr() not in weights

    def forward() -> Tensor:
        out: Tensor = drafter(
            embeds,
            features,
            positions_bT=torch.arange(CONTEXT_ROWS)[None],
            positions_bQ=torch.arange(BLOCK_ROWS)[None],
            mask=mask,
            attention="sdpa",
        )
        return out

    if not fused:
        return kept_by(forward, ours=ours)
    torch._dynamo.reset()  # noqa: SLF001 - one shape after another through one code object
    compiled = torch.compile(forward, backend="aot_eager_decomp_partition", dynamic=False)
    node: Any = compiled().grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors if ours(t)}
    return sum(storages.values())


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fused"), [("bfloat16", False), ("float32", False), ("bfloat16", True)]
)
def test_a_layer_keeps_for_its_backward_pass_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, dtype: str, *, fused: bool, lean: bool
) -> None:
    """Within 6 %: the plan leaves out one number a row of every norm and of the softmax, and counts
    the attention's output in two layouts, as flex attention keeps it."""
    monkeypatch.setattr("dflash.drafter.model.MANY_ROWS", BLOCK_ROWS - lean)
    precision = getattr(torch, dtype)
    fewer, more = (
        kept_by_drafter(replace(WIDE, num_layers=n), precision, fused=fused) for n in (2, 3)
    )
    size = precision.itemsize
    planned = layer_activation_bytes(WIDE, CONTEXT_ROWS, BLOCK_ROWS, size=size, fused=fused)
    assert more - fewer == pytest.approx(planned, rel=0.06)


def test_a_layer_of_dense_attention_keeps_what_the_plan_says() -> None:
    num_anchors, context, heads, width = 32, 256, TINY.num_heads, TINY.head_dim
    rows, groups = num_anchors * TINY.block_size, TINY.num_kv_heads
    query = torch.randn(1, heads, rows, width, requires_grad=True)
    key, value = (
        torch.randn(1, groups, context + rows, width, requires_grad=True) for _ in range(2)
    )
    mask = SplitMask(torch.ones(num_anchors, context, dtype=torch.bool), TINY.block_size)
    kept = kept_by(
        lambda: attend(query, key, value, mask=mask, attention="split"),
        # Only what grows with rows x keys: the weights, not the queries, keys or the bool mask.
        ours=lambda tensor: (
            tensor.is_floating_point() and tensor.untyped_storage().nbytes() > query.nbytes * 4
        ),
    )
    assert dense_attention_bytes(TINY, num_anchors, context) == kept
