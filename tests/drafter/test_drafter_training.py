from collections.abc import Iterator

import oracles
import pytest
import torch
from drafter_cases import TINY, cpu_scales_rows, step_inputs, target_tables, tiny_drafter
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash.drafter.attention import Attention
from dflash.drafter.head import Head, scaled_head
from dflash.drafter.masks import MaskTables
from dflash.drafter.model import Drafter
from dflash.drafter.objective import Objective, ObjectiveSettings
from dflash.drafter.training import COMPILED_PARTS, BlockLoss, StepInputs

BUDGET, ANCHORS = 256, 32
LENGTHS = [100, 7, 90]
EMBEDDING, HEAD = target_tables()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # noqa: SLF001  there is no public way to forget compiled code
    yield
    torch._dynamo.reset()  # noqa: SLF001


def block_loss(
    drafter: Drafter,
    *,
    attention: Attention = "sdpa",
    checkpoint: bool = False,
    head: Head = HEAD,
) -> BlockLoss:
    return BlockLoss(
        drafter,
        embedding_VD=EMBEDDING,
        head=head,
        settings=ObjectiveSettings(chunk_blocks=8),
        num_anchors=ANCHORS,
        seed=3,
        attention=attention,
        checkpoint=checkpoint,
    )


def batch(number: int = 0) -> StepInputs:
    inputs = step_inputs(LENGTHS, token_budget=BUDGET, supervised_share=0.9)
    return inputs._replace(batch_number=torch.tensor(number))


def gradients(loss: BlockLoss, inputs: StepInputs) -> dict[str, torch.Tensor]:
    loss.drafter.zero_grad()
    objective = loss(inputs, with_metrics=False)
    (objective.loss_sum / objective.weight_sum).backward()
    named = loss.drafter.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.skipif(not cpu_scales_rows(), reason="this torch has no row scales on a CPU")
def test_a_head_in_8_bits_alone_leaves_the_layers_as_they_are() -> None:
    drafter, inputs = tiny_drafter(), batch()
    hidden, losses = {}, {}
    for name, head in {
        "bf16": HEAD,
        "fp8-head": scaled_head(HEAD, alone=True),
        "fp8": scaled_head(HEAD),
    }.items():
        loss = block_loss(drafter, head=head)
        layers = loss.layers
        loss.layers = lambda *a, name=name, layers=layers, **k: hidden.setdefault(
            name, layers(*a, **k)
        )
        losses[name] = float(loss(inputs, with_metrics=False).loss_sum.detach())
    assert torch.equal(hidden["fp8-head"], hidden["bf16"])
    assert not torch.equal(hidden["fp8"], hidden["bf16"])
    assert len(set(losses.values())) == 3


def oracle_objective(drafter: Drafter, inputs: StepInputs) -> tuple[torch.Tensor, float]:
    """The same step from loops: anchors by sorting, labels and mask pair by pair, full logits."""
    documents, loss_mask = inputs.documents_T.tolist(), inputs.loss_mask_T.tolist()
    number = int(inputs.batch_number)
    valid = oracles.valid_anchors(loss_mask, documents)
    ranked = sorted(valid, key=lambda row: oracles.anchor_score(3, number, row), reverse=True)
    anchors = sorted(ranked[:ANCHORS])
    used = [True] * len(anchors)
    block = TINY.block_size
    labels, weights = oracles.labels_and_weights(
        anchors,
        used,
        documents,
        tokens=inputs.tokens_T.tolist(),
        loss_mask=loss_mask,
        block_size=block,
    )
    ids = [
        int(inputs.tokens_T[anchor]) if slot == 0 else TINY.mask_token_id
        for anchor in anchors
        for slot in range(block)
    ]
    positions = [int(inputs.positions_T[a]) + slot for a in anchors for slot in range(block)]
    out = drafter(
        EMBEDDING[torch.tensor(ids)][None],
        inputs.features_TC[None],
        positions_bT=inputs.positions_T[None],
        positions_bQ=torch.tensor(positions)[None],
        mask=oracles.may_read(anchors, used, documents, block_size=block),
        attention="eager",
    )
    return oracles.full_logits_loss(
        out[0],
        HEAD,
        torch.tensor([[label or 0 for label in row] for row in labels]),
        weight_NB=torch.tensor(weights),
        gamma=7.0,
        dpace_alpha=None,
    )


def test_the_whole_step_is_the_paper_written_as_loops() -> None:
    drafter, inputs = tiny_drafter(), batch(4)
    expected_loss, expected_total = oracle_objective(drafter, inputs)
    expected_loss.backward()
    expected = {
        name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None
    }
    drafter.zero_grad()
    objective = block_loss(drafter)(inputs, with_metrics=True)
    objective.loss_sum.backward()
    torch.testing.assert_close(objective.loss_sum, expected_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(float(objective.weight_sum), expected_total, rtol=1e-5, atol=0)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, name  # fp32 sums in another order


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "split"])
def test_dense_forms_give_the_same_gradients(attention: Attention, *, checkpoint: bool) -> None:
    drafter, inputs = tiny_drafter(), batch()
    eager = gradients(block_loss(drafter, attention="eager"), inputs)
    found = gradients(block_loss(drafter, attention=attention, checkpoint=checkpoint), inputs)
    assert len(eager) == len(list(drafter.parameters()))
    for name, expected in eager.items():
        assert (found[name] - expected).norm() < 1e-4 * expected.norm(), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_the_same_loss_and_metrics_as_sdpa() -> None:
    drafter, inputs = tiny_drafter(), batch()
    with torch.no_grad():
        flex = block_loss(drafter, attention="flex")(inputs, with_metrics=True)
        sdpa = block_loss(drafter)(inputs, with_metrics=True)
    for name, found, expected in zip(Objective._fields, flex, sdpa, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=name)


def test_a_step_depends_on_its_batch_number_and_on_nothing_before_it() -> None:
    loss = block_loss(tiny_drafter())
    first, second, again = (
        loss.prepare(batch(number)).positions_Q.tolist() for number in (0, 1, 0)
    )
    assert first != second
    assert first == again


def test_a_batch_without_a_valid_anchor_moves_no_weight() -> None:
    drafter = tiny_drafter()
    inputs = step_inputs([], token_budget=BUDGET)
    objective = block_loss(drafter)(inputs, with_metrics=True)
    objective.loss_sum.backward()
    assert objective.weight_sum == 0
    assert objective.accepted_blocks == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_features_in_bf16_train_fp32_masters() -> None:
    drafter, inputs = tiny_drafter(), batch()
    loss = BlockLoss(
        drafter,
        embedding_VD=EMBEDDING.bfloat16(),
        head=HEAD.bfloat16(),
        settings=ObjectiveSettings(),
        num_anchors=ANCHORS,
        seed=3,
        attention="sdpa",
    )
    objective = loss(inputs._replace(features_TC=inputs.features_TC.bfloat16()), with_metrics=False)
    objective.loss_sum.backward()
    exact = block_loss(drafter)(inputs, with_metrics=False)
    torch.testing.assert_close(objective.loss_sum, exact.loss_sum, rtol=0.02, atol=0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_preparing_a_batch_asks_nothing_of_the_host(attention: Attention) -> None:
    # Fake tensors have no values: a shape or branch that depends on one raises.
    loss = block_loss(tiny_drafter(), attention=attention)
    inputs = batch()
    with FakeTensorMode() as mode:
        prepared = loss.prepare(StepInputs(*(mode.from_tensor(tensor) for tensor in inputs)))
    assert prepared.labels_NB.shape == (ANCHORS, TINY.block_size)
    assert isinstance(prepared.mask, MaskTables) == (attention == "flex")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_flex_that_repeats_keys_twice_trains_as_sdpa_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced and partitioned as for a GPU; torch refuses a CPU only for want of kernels there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    drafter = tiny_drafter()
    assert drafter.shape.num_kv_heads < drafter.shape.num_heads, "nothing is repeated"
    plain = gradients(block_loss(drafter), batch())
    loss = block_loss(drafter, attention="flex")
    for name in COMPILED_PARTS:
        part = torch.compile(
            getattr(loss, name),
            backend="aot_eager_decomp_partition",
            fullgraph=True,
            dynamic=False,
        )
        setattr(loss, name, part)
    found = gradients(loss, batch())
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_parts_neither_break_nor_recompile_when_anchors_change() -> None:
    drafter = tiny_drafter()
    loss, plain = block_loss(drafter, attention="flex"), block_loss(drafter)
    for name in COMPILED_PARTS:
        part = torch.compile(getattr(loss, name), backend="eager", fullgraph=True, dynamic=False)
        setattr(loss, name, part)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):  # noqa: SLF001
        for number in range(4):
            found = loss(batch(number), with_metrics=False)
            expected = plain(batch(number), with_metrics=False)
            torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-5, atol=0)
