"""How slots read context and blocks: one function per backend, all of the same result.

``eager`` is bit for bit what transformers computes, ``sdpa`` the fused dense form, ``flex`` the
tiled form for a caller that is itself compiled, ``flex_compiled`` the same for one that is not.
"""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Attention = Literal["eager", "sdpa", "flex", "flex_compiled"]
Kernel = Callable[..., Tensor]
_flex: Kernel = flex_attention
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


def attend(
    q_bHQd: Tensor,
    k_bGSd: Tensor,
    v_bGSd: Tensor,
    *,
    mask: Tensor | BlockMask | None,
    attention: Attention,
) -> Tensor:
    """Return the attended values [b, Q, H * d]; each key head serves H / G query heads.

    Args:
        mask: bool [..., Q, S], True means may read (eager, sdpa); a ``BlockMask`` (both flex
            forms); None lets every slot read everything.
    """
    if attention in ("flex", "flex_compiled"):
        assert mask is None or isinstance(mask, BlockMask), "flex attention needs a BlockMask"
        kernel = compiled_flex() if attention == "flex_compiled" else _flex
        out_bHQd = kernel(q_bHQd, k_bGSd, v_bGSd, block_mask=mask, enable_gqa=True)
    else:
        assert not isinstance(mask, BlockMask), f"{attention} attention needs a dense mask"
        dense = _eager if attention == "eager" else _sdpa
        out_bHQd = dense(q_bHQd, k_bGSd, v_bGSd, mask=mask)
    return out_bHQd.transpose(1, 2).flatten(2)


@functools.cache
def compiled_flex() -> Kernel:
    """Return the compiled kernel, made on first use (which belongs in the main thread)."""
    kernel: Kernel = torch.compile(flex_attention, dynamic=False)
    return kernel


def _eager(q_bHQd: Tensor, k_bGSd: Tensor, v_bGSd: Tensor, *, mask: Tensor | None) -> Tensor:
    k_bHSd, v_bHSd = _repeat(k_bGSd, q_bHQd), _repeat(v_bGSd, q_bHQd)
    scores_bHQS = torch.matmul(q_bHQd, k_bHSd.transpose(2, 3)) * q_bHQd.shape[-1] ** -0.5
    if mask is not None:
        scores_bHQS = scores_bHQS.masked_fill(~mask, float("-inf"))
    # fp32 softmax, then back: transformers' order, needed for equality in bf16.
    weight_bHQS = F.softmax(scores_bHQS, dim=-1, dtype=torch.float32).to(q_bHQd.dtype)
    return torch.matmul(weight_bHQS, v_bHSd)


def _sdpa(q_bHQd: Tensor, k_bGSd: Tensor, v_bGSd: Tensor, *, mask: Tensor | None) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(q_bHQd, k_bGSd, v_bGSd, enable_gqa=True)
    # The memory-efficient kernel is the one that takes a mask, and it knows no grouped heads.
    k_bHSd, v_bHSd = _repeat(k_bGSd, q_bHQd), _repeat(v_bGSd, q_bHQd)
    return F.scaled_dot_product_attention(q_bHQd, k_bHSd, v_bHSd, attn_mask=mask)


def _repeat(kv_bGSd: Tensor, q_bHQd: Tensor) -> Tensor:
    return kv_bGSd.repeat_interleave(q_bHQd.shape[1] // kv_bGSd.shape[1], dim=1)
