"""z-lab's forward pass by the formulas alone, on a checkpoint's tensors: an oracle for bits.

Last bits depend on the kernels that torch has for a CPU (``ATEN_CPU_CAPABILITY`` changes them), so
golden tensors are reproduced bit for bit on some machines only; this is z-lab's arithmetic on the
machine that the test runs on.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dflash.drafter.shape import DrafterShape


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


def plain_forward(
    weights: Mapping[str, Tensor],
    shape: DrafterShape,
    *,
    embeds: Tensor,
    features: Tensor,
    positions: Tensor,
    visible: Tensor | None = None,
) -> Tensor:
    """Hidden states [b, Q, D]; *positions* [b, S + Q], *visible* [b, 1, Q, S + Q]."""
    eps, width, queries = shape.rms_norm_eps, shape.head_dim, embeds.shape[1]
    context = norm(F.linear(features, weights["fc.weight"]), weights["hidden_norm.weight"], eps)
    frequency = 1.0 / shape.rope_theta ** (torch.arange(0, width, 2).float() / width)
    angles = positions[..., None].float() * frequency
    both = torch.cat((angles, angles), dim=-1)[:, None]
    cos, sin = both.cos().to(embeds.dtype), both.sin().to(embeds.dtype)
    hidden = embeds
    for number in range(shape.num_layers):
        of = {
            name.removeprefix(f"layers.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{number}.")
        }

        def heads(x: Tensor, name: str, of: Mapping[str, Tensor] = of) -> Tensor:
            out = F.linear(x, of[f"self_attn.{name}_proj.weight"])
            return out.unflatten(-1, (-1, width))

        x = norm(hidden, of["input_layernorm.weight"], eps)
        keys_of = torch.cat((context, x), dim=1)
        q = norm(heads(x, "q"), of["self_attn.q_norm.weight"], eps).transpose(1, 2)
        k = norm(heads(keys_of, "k"), of["self_attn.k_norm.weight"], eps).transpose(1, 2)
        v = heads(keys_of, "v").transpose(1, 2)
        q = turned(q, cos[:, :, -queries:], sin[:, :, -queries:])
        k = turned(k, cos, sin)
        k, v = (x.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * width**-0.5
        if visible is not None:
            hidden_away = torch.finfo(scores.dtype).min
            scores = scores + torch.zeros_like(scores).masked_fill(~visible, hidden_away)
        share = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        merged = torch.matmul(share, v).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(merged, of["self_attn.o_proj.weight"])
        y = norm(hidden, of["post_attention_layernorm.weight"], eps)
        gate = F.silu(F.linear(y, of["mlp.gate_proj.weight"]))
        inner = gate * F.linear(y, of["mlp.up_proj.weight"])
        hidden = hidden + F.linear(inner, of["mlp.down_proj.weight"])
    return norm(hidden, weights["norm.weight"], eps)
