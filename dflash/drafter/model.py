"""The drafter network: fused target features enter every layer as extra keys and values.

Parameters carry z-lab's names. They are created in fp32 and cast to the activations' dtype at each
use, so fp32 parameters with bf16 activations are master weights with bf16 compute, and a drafter
moved to bf16 computes the same numbers without casts. The embedding and the head belong to the
target and are not here.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from dflash.drafter.attention import Attention, Mask, attend
from dflash.drafter.cache import ContextCache
from dflash.drafter.shape import DrafterShape

__all__ = ["ContextCache", "Drafter"]

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias
Lean = Literal["no", "products", "norms too"]  # what the backward pass makes again, not keeps
Rope = tuple[Tensor, Tensor]  # cos and sin, [b, positions, d], in the activations' dtype
INIT_STD = 0.02  # transformers' initializer_range of Qwen3, used by every published drafter...
INIT_WIDTH = 4096  # ...at this width or more; see Drafter.initialise
MANY_ROWS = 65_536
"""Slots of a step from which on memory counts for more than 0.3 % of its time; see ``is_lean``."""


class Projection(nn.Module):
    """``x @ weight.T``, cast to x's dtype. Holds NaN until initialised or loaded."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((outputs, inputs), torch.nan))
        self.bias = nn.Parameter(torch.full((outputs,), torch.nan)) if bias else None

    def forward(self, x: Tensor, *, linear: Linear = F.linear) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Qwen3's norm: normalise in fp32, cast back, then scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), torch.nan))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class SelfAttention(nn.Module):
    """Queries from the block; keys and values from context, then block, by the same weights."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        width, bias = shape.hidden_size, shape.attention_bias
        self.q_proj = Projection(width, q_width, bias=bias)
        self.k_proj = Projection(width, kv_width, bias=bias)
        self.v_proj = Projection(width, kv_width, bias=bias)
        self.o_proj = Projection(q_width, width, bias=bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(
        self, x_bQD: Tensor, rope: Rope, *, linear: Linear = F.linear, again: bool = False
    ) -> Tensor:
        q_bQHd = self._heads(self.q_proj(x_bQD, linear=linear))
        return _call(_norm_rotate, q_bQHd, self.q_norm, rope, again=again)

    def keys_values(
        self, x_bTD: Tensor, rope: Rope, *, linear: Linear = F.linear
    ) -> tuple[Tensor, Tensor]:
        """Return k and v [b, G, T, d] of context or block rows."""
        k_bTGd = self._heads(self.k_proj(x_bTD, linear=linear))
        v_bTGd = self._heads(self.v_proj(x_bTD, linear=linear))
        return _norm_rotate(k_bTGd, self.k_norm, rope), v_bTGd.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Projection(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor, *, linear: Linear = F.linear, lean: bool = False) -> Tensor:
        gate, up = self.gate_proj(x, linear=linear), self.up_proj(x, linear=linear)
        return _call(self._down, gate, up, linear, again=lean)

    def _down(self, gate: Tensor, up: Tensor, linear: Linear) -> Tensor:
        out: Tensor = self.down_proj(F.silu(gate) * up, linear=linear)
        return out


class DrafterLayer(nn.Module):
    """One pre-norm layer over block slots; the context is read, never updated."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        h_bQD: Tensor,
        context_bTD: Tensor,
        *,
        rope_T: Rope,
        rope_Q: Rope,
        mask: Mask | None,
        attention: Attention,
        linear: Linear,
        lean: Lean,
    ) -> Tensor:
        again, attn = lean == "norms too", self.self_attn
        x_bQD = _call(self.input_layernorm, h_bQD, again=again)
        # The context is not normed again, and projected apart: no [T + Q, D] copy.
        k_context, v_context = attn.keys_values(context_bTD, rope_T, linear=linear)
        k_block, v_block = attn.keys_values(x_bQD, rope_Q, linear=linear)
        k_bGSd = torch.cat([k_context, k_block], dim=2)
        v_bGSd = torch.cat([v_context, v_block], dim=2)
        q_bHQd = attn.queries(x_bQD, rope_Q, linear=linear, again=again)
        out = attend(q_bHQd, k_bGSd, v_bGSd, mask=mask, attention=attention, lean=lean != "no")
        return self.finish(h_bQD, out, linear=linear, lean=lean)

    def finish(
        self,
        h_bQD: Tensor,
        attended: Tensor,
        *,
        linear: Linear = F.linear,
        lean: Lean = "no",
    ) -> Tensor:
        """Add the attention's output, then the MLP's."""
        h_bQD = h_bQD + self.self_attn.o_proj(attended, linear=linear)
        x_bQD = _call(self.post_attention_layernorm, h_bQD, again=lean == "norms too")
        out: Tensor = h_bQD + self.mlp(x_bQD, linear=linear, lean=lean != "no")
        return out


class Drafter(nn.Module):
    """A DFlash drafter. Its weights are NaN until ``initialise`` or ``load_state_dict``."""

    inv_freq_bits: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Projection(shape.num_taps * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        # On the CPU whatever the default device is: equal bits everywhere, and real under "meta".
        even = torch.arange(0, shape.head_dim, 2, dtype=torch.int64, device="cpu").float()
        inv_freq = 1.0 / (shape.rope_theta ** (even / shape.head_dim))
        # Kept as int32 bits: `.to(bfloat16)` would round fp32 frequencies, and the angle would be
        # wrong by radians a few thousand positions on.
        self.register_buffer("inv_freq_bits", inv_freq.view(torch.int32), persistent=False)

    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, std), norms 1, biases 0; the same on every device.

        std is 0.02 for a hidden size of 4096 or more and grows as its inverse root below that, so
        that a narrow drafter's layers pass on as much as a wide one's. At a fixed 0.02 a drafter
        of width 192 needed twice the steps to look beyond the commonest token
        (docs/measurements/quickstart.md).

        Each matrix has a generator of its own, so that they can be drawn at once: one after
        another, the billion numbers of a Qwen3-8B drafter take a core eight seconds.
        """
        std = INIT_STD * max(1.0, INIT_WIDTH / self.shape.hidden_size) ** 0.5
        named = dict(self.named_parameters())
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**63 - 1, (len(named),), generator=generator).tolist()

        def draw(name: str, own_seed: int) -> None:
            parameter = named[name]
            with torch.no_grad():
                if parameter.ndim == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    own = torch.Generator().manual_seed(own_seed)
                    parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=own))

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw, named, seeds))

    def forward(
        self,
        embeds_bQD: Tensor,
        features_bTC: Tensor,
        *,
        positions_bT: Tensor,
        positions_bQ: Tensor,
        mask: Mask | None,
        attention: Attention,
        checkpoint: bool = False,
        linear: Linear = F.linear,
    ) -> Tensor:
        """Return out_bQD, ready for the target's head.

        Args:
            embeds_bQD: target embeddings of the slots; their dtype is the compute dtype.
            features_bTC: tapped hidden states, concatenated in tap order, not normed.
            positions_bT: integer positions of the context; positions_bQ: of the slots.
            mask: see ``attention.attend``.
            checkpoint: recompute each layer in the backward pass instead of keeping activations.
            linear: multiplies activations with weights; ``fp8.linear`` does so in 8 bits.
        """
        context_bTD = self.fuse(features_bTC, linear=linear)
        rope_T = self.rope(positions_bT, context_bTD.dtype)
        rope_Q = self.rope(positions_bQ, embeds_bQD.dtype)
        h_bQD = embeds_bQD
        # The MLP's product is as large as gate or up, repeated keys are H / G times as large as
        # keys. Compiled code makes them again where the backward pass reads them; eager code would
        # have to repeat what comes after them too.
        lean: Lean = "no"
        if torch.compiler.is_dynamo_compiling() and not checkpoint:
            lean = "norms too" if is_lean(h_bQD.shape[1]) else "products"
        for layer in self.layers:
            run = functools.partial(
                layer,
                rope_T=rope_T,
                rope_Q=rope_Q,
                mask=mask,
                attention=attention,
                linear=linear,
                lean=lean,
            )
            if checkpoint:
                # No dropout, so no generator state to keep (reading it breaks graph capture).
                h_bQD = recompute(
                    run, h_bQD, context_bTD, use_reentrant=False, preserve_rng_state=False
                )
            else:
                h_bQD = run(h_bQD, context_bTD)
        out: Tensor = self.norm(h_bQD)
        return out

    @torch.no_grad()
    def extend_context(
        self, cache: ContextCache, features_bTC: Tensor, positions_bT: Tensor
    ) -> None:
        """Append keys and values of newly committed tokens to every layer of the cache."""
        context_bTD = self.fuse(features_bTC)
        rope_T = self.rope(positions_bT, context_bTD.dtype)
        cache.begin(positions_bT)
        for number, layer in enumerate(self._layers()):
            cache.write(number, *layer.self_attn.keys_values(context_bTD, rope_T))
        cache.commit(features_bTC.shape[1])

    @torch.no_grad()
    def draft(
        self,
        embeds_bBD: Tensor,
        positions_bB: Tensor,
        cache: ContextCache,
        *,
        attention: Attention = "sdpa",
    ) -> Tensor:
        """Return out_bBD of one block that reads the whole cached context; the cache stays."""
        rope_B = self.rope(positions_bB, embeds_bBD.dtype)
        h_bBD = embeds_bBD
        mask = cache.begin(positions_bB)
        for number, layer in enumerate(self._layers()):
            x_bBD = layer.input_layernorm(h_bBD)
            k, v = cache.write(number, *layer.self_attn.keys_values(x_bBD, rope_B))
            q_bHBd = layer.self_attn.queries(x_bBD, rope_B)
            h_bBD = layer.finish(h_bBD, attend(q_bHBd, k, v, mask=mask, attention=attention))
        out: Tensor = self.norm(h_bBD)
        return out

    def fuse(self, features_bTC: Tensor, *, linear: Linear = F.linear) -> Tensor:
        """Return context_bTD, the one tensor that every layer projects to keys and values."""
        out: Tensor = self.hidden_norm(self.fc(features_bTC, linear=linear))
        return out

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return cos and sin tables, computed in fp32 from integer positions."""
        inv_freq = self.inv_freq_bits.view(torch.float32)
        half = positions.to(torch.float32)[..., None] * inv_freq
        angle = torch.cat([half, half], dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]


def is_lean(block_rows: int) -> bool:
    """Whether a compiled step of so many slots makes norms and rotated queries again as well.

    A layer's backward pass then reads and writes three more rows of D a slot, some 0.3 % of a step,
    and keeps three less: by the memory plan 15 of 103 GiB at 131,072 slots of the Qwen3-8B shape.
    """
    return block_rows > MANY_ROWS


def _call(function: Callable[..., Tensor], *inputs: object, again: bool) -> Tensor:
    """Call *function*; *again*: once more in the backward pass, instead of keeping what it makes.

    For code that is being compiled: what of the second call nobody reads is left out.
    """
    if not again:
        return function(*inputs)
    # No dropout, so no generator state to keep (reading it breaks graph capture).
    out: Tensor = recompute(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def _norm_rotate(x_bQHd: Tensor, norm: RMSNorm, rope: Rope) -> Tensor:
    return _rotate(norm(x_bQHd).transpose(1, 2), rope)


def _rotate(x_bHQd: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope[0][:, None], rope[1][:, None]
    first, second = x_bHQd.chunk(2, dim=-1)
    return x_bHQd * cos + torch.cat([-second, first], dim=-1) * sin
