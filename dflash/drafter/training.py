"""One packed batch in, one objective out: the part of a training step that is DFlash.

The attributes ``prepare``, ``layers``, ``objective`` and ``chunk`` of ``BlockLoss`` are plain
functions of tensors with static shapes; whoever executes the step may replace each by its compiled
form (``chunk`` is the inner part of ``objective``: compile the one or the other).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from dflash.drafter import fp8
from dflash.drafter.anchors import Anchors, anchor_scores, draw_anchors
from dflash.drafter.attention import Attention, Mask, SplitMask
from dflash.drafter.blocks import block_inputs, block_labels
from dflash.drafter.head import Head
from dflash.drafter.masks import (
    MaskTables,
    block_mask_from,
    context_mask,
    dense_mask,
    mask_tables,
)
from dflash.drafter.model import Drafter
from dflash.drafter.objective import (
    ChunkFunction,
    Objective,
    ObjectiveSettings,
    block_objective,
    chunk_loss,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class StepInputs(NamedTuple):
    """One packed batch on the drafter's device.

    Attributes:
        features_TC: tapped hidden states in the compute dtype.
        tokens_T: int64.
        documents_T: int64, 0, 1, 2... in order; padding is -1.
        positions_T: int64, position inside the document; padding 0.
        loss_mask_T: bool, True means supervised; padding False.
        batch_number: int64, 0-d, global number of the batch; decides the anchors.
    """

    features_TC: Tensor
    tokens_T: Tensor
    documents_T: Tensor
    positions_T: Tensor
    loss_mask_T: Tensor
    batch_number: Tensor

    @staticmethod
    def allocate(
        token_budget: int, features_width: int, *, device: torch.device, dtype: torch.dtype
    ) -> "StepInputs":
        """Buffers of *token_budget* positions, all padding and finite."""
        return StepInputs(
            features_TC=torch.zeros(token_budget, features_width, device=device, dtype=dtype),
            tokens_T=torch.zeros(token_budget, device=device, dtype=torch.int64),
            documents_T=torch.full((token_budget,), -1, device=device, dtype=torch.int64),
            positions_T=torch.zeros(token_budget, device=device, dtype=torch.int64),
            loss_mask_T=torch.zeros(token_budget, device=device, dtype=torch.bool),
            batch_number=torch.zeros((), device=device, dtype=torch.int64),
        )


class Prepared(NamedTuple):
    """What a batch and its number decide before any weight is used.

    Attributes:
        ids_Q, positions_Q: int64, what stands in each slot and where.
        labels_NB: int64; weight_NB: bool, True means supervised.
        mask: bool mask_QS, bool context_NT (split), or the tables of the block mask.
    """

    ids_Q: Tensor
    positions_Q: Tensor
    labels_NB: Tensor
    weight_NB: Tensor
    mask: Tensor | MaskTables


COMPILED_PARTS = ("prepare", "layers", "chunk")
"""The attributes of ``BlockLoss`` that a compiling mode replaces."""


class BlockLoss:
    """The loss of a drafter on packed batches of one static shape.

    Args:
        drafter: trained; its gradients are what a step is for.
        embedding_VD: the target's embedding, frozen.
        head: the target's head, frozen. As ``drafter.head.scaled_head`` rounds it, the drafter's
            own products are 8 bits wide too, unless it says ``alone``.
        settings: how slots are weighted.
        num_anchors: N; ``masks.num_anchors_for`` gives it from a density.
        seed: of the anchors.
        attention: "flex" on a CUDA device; on a CPU "split", or "sdpa" and "eager" with a dense
            mask.
        checkpoint: recompute layers in the backward pass instead of keeping their activations.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        embedding_VD: Tensor,
        head: Head,
        settings: ObjectiveSettings,
        num_anchors: int,
        seed: int,
        attention: Attention,
        checkpoint: bool = False,
    ) -> None:
        self.drafter = drafter
        self.embedding_VD = embedding_VD
        self.head: Head = head
        self.settings = settings
        self.num_anchors = num_anchors
        self.seed = seed
        self.attention: Attention = attention
        self.checkpoint = checkpoint
        self.prepare: Callable[[StepInputs], Prepared] = self._prepare
        self.layers: Callable[..., Tensor] = self._layers
        self.objective: Callable[..., Objective] = self._objective
        self.chunk: ChunkFunction = chunk_loss

    @property
    def frozen(self) -> list[Tensor]:
        """The target's tensors that a step reads and never writes."""
        if isinstance(self.head, Tensor):
            return [self.embedding_VD, self.head]
        return [self.embedding_VD, *self.head.rows, *self.head.columns]

    @property
    def block_size(self) -> int:
        """B, slots per block, the anchor included."""
        return self.drafter.shape.block_size

    def __call__(self, inputs: StepInputs, *, with_metrics: bool) -> Objective:
        prepared = self.prepare(inputs)
        hidden_QD = self.layers(
            inputs.features_TC,
            inputs.positions_T,
            ids_Q=prepared.ids_Q,
            positions_Q=prepared.positions_Q,
            mask=self.attention_mask(prepared, num_context=inputs.tokens_T.numel()),
        )
        return self.objective(
            hidden_QD, prepared.labels_NB, prepared.weight_NB, with_metrics=with_metrics
        )

    def attention_mask(self, prepared: Prepared, *, num_context: int) -> Mask:
        """Return the mask in the form that attention takes; launches no kernel, never compiled."""
        if self.attention == "split":
            assert isinstance(prepared.mask, Tensor), "split attention has no tables"
            return SplitMask(prepared.mask, self.block_size)
        if isinstance(prepared.mask, Tensor):
            return prepared.mask
        return block_mask_from(prepared.mask, num_context=num_context, block_size=self.block_size)

    def _prepare(self, inputs: StepInputs) -> Prepared:
        shape = self.drafter.shape
        tokens_T, documents_T, positions_T = inputs.tokens_T, inputs.documents_T, inputs.positions_T
        scores_T = anchor_scores(
            self.seed, inputs.batch_number, num_positions=tokens_T.numel(), device=tokens_T.device
        )
        anchors = draw_anchors(
            inputs.loss_mask_T,
            documents_T,
            positions_T,
            scores_T=scores_T,
            num_anchors=self.num_anchors,
        )
        ids_Q, positions_Q = block_inputs(
            anchors,
            tokens_T,
            positions_T,
            block_size=self.block_size,
            mask_token_id=shape.mask_token_id,
        )
        labels_NB, weight_NB = block_labels(
            anchors,
            tokens_T,
            documents_T,
            loss_mask_T=inputs.loss_mask_T,
            block_size=self.block_size,
        )
        return Prepared(ids_Q, positions_Q, labels_NB, weight_NB, self._mask(anchors, inputs))

    def _mask(self, anchors: Anchors, inputs: StepInputs) -> Tensor | MaskTables:
        block_size = self.block_size
        if self.attention == "split":
            return context_mask(anchors, inputs.documents_T)
        if self.attention in ("eager", "sdpa"):
            return dense_mask(anchors, inputs.documents_T, block_size=block_size)
        row_T = torch.arange(inputs.tokens_T.numel(), device=inputs.tokens_T.device)
        return mask_tables(anchors, row_T - inputs.positions_T, block_size=block_size)

    def _layers(
        self,
        features_TC: Tensor,
        positions_T: Tensor,
        *,
        ids_Q: Tensor,
        positions_Q: Tensor,
        mask: Mask,
    ) -> Tensor:
        embeds_QD = F.embedding(ids_Q, self.embedding_VD).to(features_TC.dtype)
        out_bQD: Tensor = self.drafter(
            embeds_QD[None],
            features_TC[None],
            positions_bT=positions_T[None],
            positions_bQ=positions_Q[None],
            mask=mask,
            attention=self.attention,
            checkpoint=self.checkpoint,
            linear=F.linear if isinstance(self.head, Tensor) or self.head.alone else fp8.linear,
        )
        return out_bQD[0]

    def _objective(
        self, hidden_QD: Tensor, labels_NB: Tensor, weight_NB: Tensor, *, with_metrics: bool
    ) -> Objective:
        return block_objective(
            hidden_QD,
            self.head.to(hidden_QD.dtype) if isinstance(self.head, Tensor) else self.head,
            labels_NB,
            weight_NB=weight_NB,
            settings=self.settings,
            with_metrics=with_metrics,
            chunk=self.chunk,
        )
