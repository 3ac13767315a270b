"""How slots read context and blocks: one function per backend, all of the same result.

``eager`` is bit for bit what transformers computes, ``sdpa`` the fused dense form, ``split`` the
dense form without the keys of other blocks (the fastest on a CPU), ``flex`` the tiled form: inlined
into a caller that is being compiled, its own compiled kernel for one that is not.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint as recompute

Attention = Literal["eager", "sdpa", "split", "flex"]
Kernel = Callable[..., Tensor]
_flex: Kernel = flex_attention
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

FLEX_HEAD_DIM = 16  # the smallest that torch's flex kernels take on a GPU
TUNED_HEAD_DIMS = (64, 128)
FLEX_OPTIONS: dict[str, int] = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
    "bwd_num_stages": 2,
}
"""The fastest of 24 settings at shape A on one H200 (docs/measurements/step.md)."""


class SplitMask(NamedTuple):
    """What slots may read when every slot also reads its own whole block.

    Attributes:
        context_NT: bool, True means that all slots of the block may read it.
        block_size: B; slots ``n*B .. n*B+B-1`` are block n.
    """

    context_NT: Tensor
    block_size: int


Mask = Tensor | SplitMask | BlockMask
"""bool [..., Q, S] for eager and sdpa; the other forms each have a mask of their own."""


def attend(
    q_bHQd: Tensor,
    k_bGSd: Tensor,
    v_bGSd: Tensor,
    *,
    mask: Mask | None,
    attention: Attention,
    lean: bool = False,
) -> Tensor:
    """Return the attended values [b, Q, H * d]; each key head serves H / G query heads.

    Args:
        mask: bool [..., Q, S], True means may read (eager, sdpa); a ``SplitMask`` (split); a
            ``BlockMask`` (flex); None lets every slot read everything (not split).
        lean: flex and sdpa repeat keys and values again in the backward pass instead of keeping
            H / G copies; for code that is being compiled.
    """
    if attention == "flex":
        assert mask is None or isinstance(mask, BlockMask), "flex attention needs a BlockMask"
        # The other question, is_compiling(), answers yes in every thread while any one compiles
        # (torch 2.13 and 2.14). A CPU has no compiled kernel for the backward pass.
        inlined = torch.compiler.is_dynamo_compiling() or not q_bHQd.is_cuda
        kernel = _flex if inlined else compiled_flex()
        # Grouped heads would leave the gradient of keys to 1/4 as many, 4 times as long programs,
        # the longest of which start last: repeated, forward and backward take 14 % less.
        k_bHSd, v_bHSd = (_repeat(x, q_bHQd, lean=lean) for x in (k_bGSd, v_bGSd))
        options = FLEX_OPTIONS if q_bHQd.is_cuda and q_bHQd.shape[-1] in TUNED_HEAD_DIMS else None
        out_bHQd = kernel(q_bHQd, k_bHSd, v_bHSd, block_mask=mask, kernel_options=options)
    elif attention == "split":
        assert isinstance(mask, SplitMask), "split attention needs a SplitMask"
        out_bHQd = _split(q_bHQd, k_bGSd, v_bGSd, mask=mask)
    else:
        assert mask is None or type(mask) is Tensor, f"{attention} attention needs a dense mask"
        dense = _eager if attention == "eager" else functools.partial(_sdpa, lean=lean)
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


def _sdpa(
    q_bHQd: Tensor, k_bGSd: Tensor, v_bGSd: Tensor, *, mask: Tensor | None, lean: bool
) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(q_bHQd, k_bGSd, v_bGSd, enable_gqa=True)
    # The memory-efficient kernel is the one that takes a mask, and it knows no grouped heads.
    k_bHSd, v_bHSd = (_repeat(x, q_bHQd, lean=lean) for x in (k_bGSd, v_bGSd))
    return F.scaled_dot_product_attention(q_bHQd, k_bHSd, v_bHSd, attn_mask=mask)


def _split(q_bHQd: Tensor, k_bGSd: Tensor, v_bGSd: Tensor, *, mask: SplitMask) -> Tensor:
    """One softmax over T context keys and the B keys of the slot's own block, not all Q of them."""
    num_context, size = mask.context_NT.shape[-1], mask.block_size
    parts = [num_context, k_bGSd.shape[2] - num_context]
    k_bHTd, k_bHQd = _repeat(k_bGSd, q_bHQd).split(parts, dim=2)
    v_bHTd, v_bHQd = _repeat(v_bGSd, q_bHQd).split(parts, dim=2)
    q_bHQd = q_bHQd * q_bHQd.shape[-1] ** -0.5
    hidden_QT = ~mask.context_NT.repeat_interleave(size, dim=0)
    context_bHQT = (q_bHQd @ k_bHTd.transpose(2, 3)).masked_fill(hidden_QT, float("-inf"))
    q_bHNBd, k_bHNBd, v_bHNBd = (x.unflatten(2, (-1, size)) for x in (q_bHQd, k_bHQd, v_bHQd))
    own_bHQB = (q_bHNBd @ k_bHNBd.transpose(3, 4)).flatten(2, 3)
    scores = torch.cat([context_bHQT, own_bHQB], dim=-1)
    weight = F.softmax(scores, dim=-1, dtype=torch.float32).to(q_bHQd.dtype)
    of_context_bHQT, of_own_bHQB = weight.split([num_context, size], dim=-1)
    own_bHQd = (of_own_bHQB.unflatten(2, (-1, size)) @ v_bHNBd).flatten(2, 3)
    out_bHQd: Tensor = of_context_bHQT @ v_bHTd + own_bHQd
    return out_bHQd


def _repeat(kv_bGSd: Tensor, q_bHQd: Tensor, *, lean: bool = False) -> Tensor:
    heads_per_key = q_bHQd.shape[1] // kv_bGSd.shape[1]
    if heads_per_key == 1:
        return kv_bGSd
    if not lean:
        return kv_bGSd.repeat_interleave(heads_per_key, dim=1)
    out: Tensor = recompute(
        _repeat_heads, kv_bGSd, heads_per_key, use_reentrant=False, preserve_rng_state=False
    )
    return out


def _repeat_heads(kv_bGSd: Tensor, times: int) -> Tensor:
    return kv_bGSd.repeat_interleave(times, dim=1)
