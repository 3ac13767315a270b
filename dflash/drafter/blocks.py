"""What stands in a block's slots and what each slot must predict."""

import torch
from torch import Tensor

from dflash.drafter.anchors import Anchors


def block_inputs(
    anchors: Anchors,
    tokens_T: Tensor,
    positions_T: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> tuple[Tensor, Tensor]:
    """Return int64 ids_Q and int64 positions_Q of the drafted slots.

    Slot 0 holds the anchor's token, every other slot the mask token (an unused block: only mask
    tokens). Positions count inside the document, so they are the ones that decoding uses.
    """
    slot_B = torch.arange(block_size, dtype=torch.int64, device=tokens_T.device)
    is_anchor_NB = anchors.used_N[:, None] & (slot_B == 0)
    ids_NB = torch.where(is_anchor_NB, tokens_T[anchors.anchors_N][:, None], mask_token_id)
    positions_NB = positions_T[anchors.anchors_N][:, None] + slot_B
    return ids_NB.reshape(-1), positions_NB.reshape(-1)


def block_labels(
    anchors: Anchors,
    tokens_T: Tensor,
    documents_T: Tensor,
    *,
    loss_mask_T: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return int64 labels_NB and bool weight_NB; True means the slot is supervised.

    Slot k predicts the token at anchor + k, unshifted. Supervision ends before the first slot that
    lies past the batch, in another document, or on an unsupervised token: decoding would stop
    there too. Slot 0 is given, never predicted.
    """
    num_positions = tokens_T.numel()
    slot_B = torch.arange(block_size, dtype=torch.int64, device=tokens_T.device)
    row_NB = anchors.anchors_N[:, None] + slot_B
    inside_NB = row_NB < num_positions
    row_NB = row_NB.clamp(max=num_positions - 1)
    same_document_NB = documents_T[row_NB] == documents_T[anchors.anchors_N][:, None]
    open_NB = anchors.used_N[:, None] & inside_NB & same_document_NB & loss_mask_T[row_NB]
    unbroken_NB = open_NB.to(torch.int32).cumprod(dim=1, dtype=torch.int32).to(torch.bool)
    return tokens_T[row_NB], unbroken_NB & (slot_B > 0)
