import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from drafter_cases import TINY, step_inputs, target_tables, tiny_drafter
from torch import Tensor

from dflash.drafter import fp8
from dflash.drafter.anchors import Anchors
from dflash.drafter.attention import Attention
from dflash.drafter.blocks import block_inputs
from dflash.drafter.masks import dense_mask
from dflash.drafter.model import ContextCache, Drafter, Linear
from dflash.drafter.training import StepInputs
from dflash.errors import UsageError

BLOCK, BUDGET = TINY.block_size, 48
EMBEDDING, _ = target_tables()
# Two documents of 20 and 22 positions, a padding tail of 6; blocks overlap each other.
ANCHORS = Anchors(
    torch.tensor([1, 7, 9, 15, 24, 30, 37, 37]),
    torch.tensor([True] * 7 + [False]),
)
DENSE: tuple[Attention, ...] = ("eager", "sdpa")


def batch() -> StepInputs:
    return step_inputs([20, 22], token_budget=BUDGET)


def block_ids(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    return block_inputs(
        ANCHORS, inputs.tokens_T, inputs.positions_T, block_size=BLOCK, mask_token_id=60
    )


def train_forward(
    drafter: Drafter,
    inputs: StepInputs,
    *,
    attention: Attention = "eager",
    mask: Tensor | None = None,
    ids_Q: Tensor | None = None,
) -> Tensor:
    """Return [N, B, D], the outputs of every block of one packed batch."""
    own_ids_Q, positions_Q = block_ids(inputs)
    if mask is None:
        mask = dense_mask(ANCHORS, inputs.documents_T, block_size=BLOCK)
    with torch.no_grad():
        out: Tensor = drafter(
            EMBEDDING[own_ids_Q if ids_Q is None else ids_Q][None],
            inputs.features_TC[None],
            positions_bT=inputs.positions_T[None],
            positions_bQ=positions_Q[None],
            mask=mask,
            attention=attention,
        )
    return out.view(-1, BLOCK, TINY.hidden_size)


def infer_block(drafter: Drafter, inputs: StepInputs, block: int, *, pieces: int = 1) -> Tensor:
    """Return [B, D] of one block, decoded against its own document's cached context."""
    anchor = int(ANCHORS.anchors_N[block])
    start = anchor - int(inputs.positions_T[anchor])
    cache = ContextCache(TINY, max_tokens=BUDGET, device="cpu", dtype=torch.float32)
    for rows in torch.arange(start, anchor).chunk(pieces):
        drafter.extend_context(
            cache, inputs.features_TC[rows][None], inputs.positions_T[rows][None]
        )
    assert cache.length == anchor - start
    ids_Q, positions_Q = block_ids(inputs)
    slots = slice(block * BLOCK, (block + 1) * BLOCK)
    return drafter.draft(EMBEDDING[ids_Q[slots]][None], positions_Q[slots][None], cache)[0]


def used_blocks() -> list[int]:
    return [block for block, used in enumerate(ANCHORS.used_N.tolist()) if used]


@pytest.mark.parametrize("attention", DENSE)
def test_a_trained_block_equals_the_block_that_decoding_drafts(attention: Attention) -> None:
    drafter, inputs = tiny_drafter(), batch()
    trained = train_forward(drafter, inputs, attention=attention)
    for block in used_blocks():
        for pieces in (1, 3):
            decoded = infer_block(drafter, inputs, block, pieces=pieces)
            torch.testing.assert_close(trained[block], decoded, atol=1e-5, rtol=0)


def test_a_context_that_includes_the_anchor_does_not_equal_decoding() -> None:
    # The negative control: `<` becomes `<=`, and the comparison above must notice.
    drafter, inputs = tiny_drafter(), batch()
    leaky = dense_mask(ANCHORS, inputs.documents_T, block_size=BLOCK)
    leaky[torch.arange(len(leaky)), ANCHORS.anchors_N.repeat_interleave(BLOCK)] = True
    trained = train_forward(drafter, inputs, mask=leaky)
    for block in used_blocks():
        assert (trained[block] - infer_block(drafter, inputs, block)).abs().max() > 1e-2


def test_sdpa_equals_eager() -> None:
    drafter, inputs = tiny_drafter(), batch()
    eager, sdpa = (train_forward(drafter, inputs, attention=kind) for kind in DENSE)
    torch.testing.assert_close(sdpa, eager, atol=2e-5, rtol=0)


@pytest.mark.parametrize("attention", DENSE)
def test_a_block_never_moves_with_what_it_must_not_see(attention: Attention) -> None:
    drafter, inputs = tiny_drafter(), batch()
    before = train_forward(drafter, inputs, attention=attention)
    for block in used_blocks():
        anchor = int(ANCHORS.anchors_N[block])
        in_past = torch.arange(BUDGET) < anchor
        seen_T = in_past & (inputs.documents_T == inputs.documents_T[anchor])
        features_TC = torch.where(seen_T[:, None], inputs.features_TC, 7.0)
        after = train_forward(
            drafter, inputs._replace(features_TC=features_TC), attention=attention
        )
        assert (after[block] - before[block]).abs().max() == 0.0


@pytest.mark.parametrize("attention", DENSE)
def test_a_block_moves_with_each_context_position_of_its_own_past(attention: Attention) -> None:
    drafter, inputs = tiny_drafter(), batch()
    before = train_forward(drafter, inputs, attention=attention)
    for row in (20, 23, 29):
        features_TC = inputs.features_TC.clone()
        features_TC[row] += 3
        after = train_forward(
            drafter, inputs._replace(features_TC=features_TC), attention=attention
        )
        moved = [bool((after[block] != before[block]).any()) for block in range(8)]
        expected = [anchor > row and used for anchor, used in zip(*listed(ANCHORS), strict=True)]
        assert moved == expected


def listed(anchors: Anchors) -> tuple[list[int], list[bool]]:
    return anchors.anchors_N.tolist(), anchors.used_N.tolist()


@pytest.mark.parametrize("attention", DENSE)
def test_a_block_moves_with_its_own_slots_and_with_no_other_block(attention: Attention) -> None:
    drafter, inputs = tiny_drafter(), batch()
    before = train_forward(drafter, inputs, attention=attention)
    ids_Q, _ = block_ids(inputs)
    for block in range(8):
        changed_Q = ids_Q.clone()
        changed_Q[(block + 1) * BLOCK - 1] = 5
        after = train_forward(drafter, inputs, attention=attention, ids_Q=changed_Q)
        moved = (after != before).flatten(1).any(dim=1)
        assert moved.tolist() == [other == block for other in range(8)]
        assert (after[block] != before[block]).any(dim=1).all()  # bidirectional: slot 0 too


def test_an_unused_block_gives_finite_output_and_gradient() -> None:
    drafter, inputs = tiny_drafter(), batch()
    nothing = Anchors(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
    mask = dense_mask(nothing, inputs.documents_T, block_size=BLOCK)
    out = drafter(
        EMBEDDING[torch.full((2 * BLOCK,), 60)][None],
        inputs.features_TC[None],
        positions_bT=inputs.positions_T[None],
        positions_bQ=torch.arange(BLOCK).repeat(2)[None],
        mask=mask,
        attention="eager",
    )
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())


def test_checkpointing_changes_neither_output_nor_gradient() -> None:
    inputs = batch()
    ids_Q, positions_Q = block_ids(inputs)
    found = []
    for checkpoint in (False, True):
        drafter = tiny_drafter()
        out = drafter(
            EMBEDDING[ids_Q][None],
            inputs.features_TC[None],
            positions_bT=inputs.positions_T[None],
            positions_bQ=positions_Q[None],
            mask=dense_mask(ANCHORS, inputs.documents_T, block_size=BLOCK),
            attention="sdpa",
            checkpoint=checkpoint,
        )
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
    assert len(found[0]) == len(list(drafter.parameters())) + 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
@pytest.mark.parametrize("linear", [F.linear, fp8.linear], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("many_rows", [10**6, 1], ids=["products", "norms too"])
def test_what_compiled_code_makes_again_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, linear: Linear, many_rows: int
) -> None:
    """Partitioned as every compiling backend does it, but run kernel by kernel as eager code is."""
    monkeypatch.setattr("dflash.drafter.model.MANY_ROWS", many_rows)
    inputs = batch()
    ids_Q, positions_Q = block_ids(inputs)
    mask = dense_mask(ANCHORS, inputs.documents_T, block_size=BLOCK)

    def step(drafter: Drafter) -> Tensor:
        out: Tensor = drafter(
            EMBEDDING[ids_Q][None].bfloat16(),
            inputs.features_TC[None].bfloat16(),
            positions_bT=inputs.positions_T[None],
            positions_bQ=positions_Q[None],
            mask=mask,
            attention="sdpa",
            linear=linear,
        )
        return out

    torch._dynamo.reset()  # noqa: SLF001 - one code object, compiled twice
    found = []
    for run in (step, torch.compile(step, backend="aot_eager", dynamic=False)):
        drafter = tiny_drafter().bfloat16()
        out = run(drafter)
        out.float().square().sum().backward()
        found.append([out.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
    assert len(found[0]) == len(list(drafter.parameters())) + 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_checkpointing_keeps_less_for_the_backward_pass() -> None:
    inputs = batch()
    ids_Q, positions_Q = block_ids(inputs)
    drafter = tiny_drafter(num_layers=4)
    kept = []
    for checkpoint in (False, True):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            drafter(
                EMBEDDING[ids_Q][None],
                inputs.features_TC[None],
                positions_bT=inputs.positions_T[None],
                positions_bQ=positions_Q[None],
                mask=dense_mask(ANCHORS, inputs.documents_T, block_size=BLOCK),
                attention="sdpa",
                checkpoint=checkpoint,
            )
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 4


def test_parameters_carry_z_labs_names_and_shapes() -> None:
    found = {name: tuple(p.shape) for name, p in Drafter(TINY).named_parameters()}
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for layer in ("layers.0.", "layers.1."):
        expected |= {
            layer + "input_layernorm.weight": (32,),
            layer + "post_attention_layernorm.weight": (32,),
            layer + "self_attn.q_proj.weight": (64, 32),
            layer + "self_attn.k_proj.weight": (32, 32),
            layer + "self_attn.v_proj.weight": (32, 32),
            layer + "self_attn.o_proj.weight": (32, 64),
            layer + "self_attn.q_norm.weight": (16,),
            layer + "self_attn.k_norm.weight": (16,),
            layer + "mlp.gate_proj.weight": (48, 32),
            layer + "mlp.up_proj.weight": (48, 32),
            layer + "mlp.down_proj.weight": (32, 48),
        }
    assert found == expected
    assert set(Drafter(TINY).state_dict()) == set(expected)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_parameter_count_is_what_the_module_holds(*, attention_bias: bool) -> None:
    shape = replace(TINY, attention_bias=attention_bias)
    assert shape.num_parameters == sum(p.numel() for p in Drafter(shape).parameters())


def test_a_bias_is_used_by_all_four_projections() -> None:
    inputs = batch()
    before = train_forward(tiny_drafter(attention_bias=True), inputs)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        drafter = tiny_drafter(attention_bias=True)
        bias = drafter.get_parameter(f"layers.1.self_attn.{name}.bias")
        with torch.no_grad():
            bias += torch.linspace(-1, 1, len(bias))
        assert (train_forward(drafter, inputs) - before).abs().max() > 1e-4


def test_positions_stay_exact_when_the_drafter_moves_to_bf16() -> None:
    drafter = tiny_drafter()
    moved = copy.deepcopy(drafter).to(torch.bfloat16)
    positions = torch.arange(40_000, 40_100)[None]
    for found, expected in zip(
        moved.rope(positions, torch.float32), drafter.rope(positions, torch.float32), strict=True
    ):
        assert torch.equal(found, expected)
    inv_freq = drafter.inv_freq_bits.view(torch.float32)
    exact = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(inv_freq.double(), exact, rtol=1e-6, atol=0)


def test_a_draft_leaves_the_cache_as_it_was() -> None:
    drafter, inputs = tiny_drafter(), batch()
    cache = ContextCache(TINY, max_tokens=10, device="cpu", dtype=torch.float32)
    drafter.extend_context(cache, inputs.features_TC[None, :10], inputs.positions_T[None, :10])
    embeds, positions = EMBEDDING[None, :BLOCK], torch.arange(10, 10 + BLOCK)[None]
    first = drafter.draft(embeds, positions, cache)
    assert cache.length == 10
    assert torch.equal(drafter.draft(embeds, positions, cache), first)


def test_a_truncated_cache_equals_one_that_never_held_more() -> None:
    drafter, inputs = tiny_drafter(), batch()
    embeds, positions = EMBEDDING[None, :BLOCK], torch.arange(6, 6 + BLOCK)[None]
    long, short = (
        ContextCache(TINY, max_tokens=20, device="cpu", dtype=torch.float32) for _ in range(2)
    )
    drafter.extend_context(long, inputs.features_TC[None, :20], inputs.positions_T[None, :20])
    long.truncate(6)
    drafter.extend_context(short, inputs.features_TC[None, :6], inputs.positions_T[None, :6])
    torch.testing.assert_close(
        drafter.draft(embeds, positions, long), drafter.draft(embeds, positions, short)
    )


def test_a_cache_refuses_more_rows_than_it_holds() -> None:
    drafter, inputs = tiny_drafter(), batch()
    cache = ContextCache(TINY, max_tokens=10, device="cpu", dtype=torch.float32)
    with pytest.raises(UsageError, match="holds 10 tokens, 20 are needed"):
        drafter.extend_context(cache, inputs.features_TC[None, :20], inputs.positions_T[None, :20])
    with pytest.raises(UsageError, match="cannot keep 3 of 0"):
        cache.truncate(3)
