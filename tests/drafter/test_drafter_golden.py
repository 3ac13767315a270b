"""Against tensors that z-lab's own class computed (see tests/golden/config.json's metadata).

Hidden states, logits and the generation come from z-lab's class; labels, masks and losses from
formulas of ours that were cross-checked against SpecForge, as z-lab has no training code.
"""

import pytest
import torch
from drafter_cases import golden_drafter, golden_tensors, golden_weights
from plain_drafter import plain_forward
from torch import Tensor

from dflash.drafter.acceptance import accepted_lengths
from dflash.drafter.anchors import Anchors
from dflash.drafter.attention import Attention
from dflash.drafter.blocks import block_inputs, block_labels
from dflash.drafter.masks import dense_mask
from dflash.drafter.objective import ObjectiveSettings, block_objective, slot_weights

CONTEXT, BLOCK, BLOCKS, ROWS, PREFIX = 24, 8, 4, 2, 11
DOCUMENTS = torch.zeros(CONTEXT, dtype=torch.int64)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return golden_tensors()


def anchors_of(golden: dict[str, Tensor], row: int) -> Anchors:
    return Anchors(golden["anchors"][row], torch.ones(BLOCKS, dtype=torch.bool))


def labelled(golden: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    pairs = [
        block_labels(
            anchors_of(golden, row),
            golden["input_ids"][row],
            DOCUMENTS,
            loss_mask_T=golden["loss_mask"][row].bool(),
            block_size=BLOCK,
        )
        for row in range(ROWS)
    ]
    return torch.stack([labels for labels, _ in pairs]), torch.stack([m for _, m in pairs])


def inputs_of(golden: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    pairs = [
        block_inputs(
            anchors_of(golden, row),
            golden["input_ids"][row],
            torch.arange(CONTEXT),
            block_size=BLOCK,
            mask_token_id=130,
        )
        for row in range(ROWS)
    ]
    return torch.stack([ids for ids, _ in pairs]), torch.stack([p for _, p in pairs])


def train_forward(golden: dict[str, Tensor], attention: Attention) -> Tensor:
    ids_bQ, positions_bQ = inputs_of(golden)
    with torch.no_grad():
        out: Tensor = golden_drafter()(
            golden["embed_tokens"][ids_bQ],
            golden["target_hidden"],
            positions_bT=torch.arange(CONTEXT).expand(ROWS, -1),
            positions_bQ=positions_bQ,
            mask=golden["train_mask_bool"],
            attention=attention,
        )
    return out


def infer_forward(golden: dict[str, Tensor], attention: Attention, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        out: Tensor = golden_drafter()(
            golden["embed_tokens"][golden["infer_block_ids"]].to(dtype),
            golden["target_hidden"][:, :PREFIX].to(dtype),
            positions_bT=golden["infer_pos"][:, :PREFIX],
            positions_bQ=golden["infer_pos"][:, PREFIX:],
            mask=None,
            attention=attention,
        )
    return out


def assert_is_z_labs(ours: Tensor, plain: Tensor, golden: Tensor) -> None:
    """Bit for bit z-lab's arithmetic here, and so the golden tensor wherever that gives its bits.
    Not every CPU does: on an AMD EPYC with AVX2 both are 2.6e-6 off."""
    assert torch.equal(ours, plain)
    torch.testing.assert_close(ours, golden, atol=2e-5, rtol=0)


def test_the_training_forward_is_bit_for_bit_z_labs(golden: dict[str, Tensor]) -> None:
    ids_bQ, positions_bQ = inputs_of(golden)
    context_bT = torch.arange(CONTEXT).expand(ROWS, -1)
    plain = plain_forward(
        golden_weights(),
        golden_drafter().shape,
        embeds=golden["embed_tokens"][ids_bQ],
        features=golden["target_hidden"],
        positions=torch.cat((context_bT, positions_bQ), dim=1),
        visible=golden["train_mask_bool"],
    )
    assert_is_z_labs(train_forward(golden, "eager"), plain, golden["train_hidden_fp32"])


def plain_infer(golden: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    return plain_forward(
        {name: tensor.to(dtype) for name, tensor in golden_weights().items()},
        golden_drafter().shape,
        embeds=golden["embed_tokens"][golden["infer_block_ids"]].to(dtype),
        features=golden["target_hidden"][:, :PREFIX].to(dtype),
        positions=golden["infer_pos"],
    )


def test_the_inference_forward_is_bit_for_bit_z_labs_in_fp32(golden: dict[str, Tensor]) -> None:
    out = infer_forward(golden, "eager", torch.float32)
    assert_is_z_labs(out, plain_infer(golden, torch.float32), golden["infer_hidden_fp32"])
    logits = out @ golden["lm_head"].T
    torch.testing.assert_close(logits, golden["infer_logits_fp32"], atol=2e-5, rtol=0)


def test_the_inference_forward_is_bit_for_bit_z_labs_in_bf16(golden: dict[str, Tensor]) -> None:
    out = infer_forward(golden, "eager", torch.bfloat16)
    assert torch.equal(out, plain_infer(golden, torch.bfloat16))
    assert torch.equal(out, golden["infer_hidden_bf16"])


def test_a_drafter_moved_to_bf16_is_bit_for_bit_the_fp32_masters(golden: dict[str, Tensor]) -> None:
    drafter = golden_drafter().to(torch.bfloat16)
    with torch.no_grad():
        out = drafter(
            golden["embed_tokens"][golden["infer_block_ids"]].bfloat16(),
            golden["target_hidden"][:, :PREFIX].bfloat16(),
            positions_bT=golden["infer_pos"][:, :PREFIX],
            positions_bQ=golden["infer_pos"][:, PREFIX:],
            mask=None,
            attention="eager",
        )
    assert torch.equal(out, golden["infer_hidden_bf16"])


def test_sdpa_agrees_with_z_labs_eager_forward(golden: dict[str, Tensor]) -> None:
    # 2e-5: another order of the same fp32 sums, on values of order 1.
    train = train_forward(golden, "sdpa")
    torch.testing.assert_close(train, golden["train_hidden_fp32"], atol=2e-5, rtol=0)
    infer = infer_forward(golden, "sdpa", torch.float32)
    torch.testing.assert_close(infer, golden["infer_hidden_fp32"], atol=2e-5, rtol=0)


def test_block_inputs_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    ids_bQ, positions_bQ = inputs_of(golden)
    assert torch.equal(positions_bQ, golden["train_pos"][:, CONTEXT:])
    by_block = ids_bQ.view(ROWS, BLOCKS, BLOCK)
    assert torch.equal(by_block[:, :, 0], golden["input_ids"].gather(1, golden["anchors"]))
    assert (by_block[:, :, 1:] == 130).all()


def test_the_dense_mask_is_the_golden_one(golden: dict[str, Tensor]) -> None:
    for row in range(ROWS):
        mask = dense_mask(anchors_of(golden, row), DOCUMENTS, block_size=BLOCK)
        assert torch.equal(mask, golden["train_mask_bool"][row, 0])


def test_labels_and_weights_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    # No golden block has a hole in its supervision, so the golden mask (which would keep slots
    # after a hole) and ours (which is cut there) must be the same; holes are tested by oracle.
    after_hole = golden["weight_mask"][:, :, 1:].diff(dim=-1) > 0
    assert not after_hole.any()
    labels, weights = labelled(golden)
    assert torch.equal(labels, golden["labels"])
    assert torch.equal(weights.float(), golden["weight_mask"])


def test_cross_entropy_is_the_golden_one(golden: dict[str, Tensor]) -> None:
    # One slot at a time: a block whose only supervised slot is k has the loss CE_k.
    settings = ObjectiveSettings(gamma=None)
    for slot in range(1, BLOCK):
        weight = torch.zeros(BLOCKS * ROWS, BLOCK, dtype=torch.bool)
        weight[:, slot] = True
        objective = block_objective(
            golden["train_hidden_fp32"].view(-1, 32),
            golden["lm_head"],
            golden["labels"].view(-1, BLOCK),
            weight_NB=weight,
            settings=settings,
            with_metrics=False,
        )
        torch.testing.assert_close(objective.loss_sum, golden["ce"][:, :, slot].sum())


@pytest.mark.parametrize("gamma", [4, 7])
def test_the_decayed_loss_is_the_golden_one(golden: dict[str, Tensor], gamma: int) -> None:
    labels, weights = labelled(golden)
    objective = block_objective(
        golden["train_hidden_fp32"].view(-1, 32),
        golden["lm_head"],
        labels.view(-1, BLOCK),
        weight_NB=weights.view(-1, BLOCK),
        settings=ObjectiveSettings(gamma=gamma, chunk_blocks=3),
        with_metrics=False,
    )
    loss = objective.loss_sum / objective.weight_sum
    torch.testing.assert_close(loss, golden[f"loss_gamma{gamma}"][0], rtol=1e-5, atol=0)


def test_dpace_weights_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    weights = slot_weights(
        golden["ce"].view(-1, BLOCK)[:, 1:],
        golden["weight_mask"].view(-1, BLOCK)[:, 1:].bool(),
        settings=ObjectiveSettings(kind="dpace", dpace_alpha=0.5),
    )
    expected = golden["dpace_weights_alpha0.5"].view(-1, BLOCK)[:, 1:]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_accepted_lengths_are_the_golden_ones(golden: dict[str, Tensor]) -> None:
    best = (golden["train_hidden_fp32"] @ golden["lm_head"].T).argmax(-1)
    correct = best.view(-1, BLOCK) == golden["labels"].view(-1, BLOCK)
    lengths = accepted_lengths(correct, golden["weight_mask"].view(-1, BLOCK).bool())
    # The golden number leaves the bonus token out.
    assert torch.equal(lengths, golden["accept_len_per_block"].view(-1) + 1)
