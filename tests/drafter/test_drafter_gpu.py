"""What only a CUDA GPU can show: compiled flex attention, no host synchronisation, capture."""

from collections.abc import Iterator

import pytest
import torch
from drafter_cases import step_inputs, target_tables, tiny_drafter
from torch import Tensor

from dflash.drafter.anchors import Anchors, anchor_scores, draw_anchors
from dflash.drafter.attention import Attention, compiled_flex
from dflash.drafter.fp8 import E5M2, LARGEST
from dflash.drafter.head import head_gradient, scaled_head
from dflash.drafter.masks import block_mask, dense_mask
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.training import COMPILED_PARTS, BlockLoss, StepInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Advice of the compiler about speed, and torch's note that this debug mode is a prototype.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
BUDGET, ANCHORS, BLOCK = 1024, 64, 8
LENGTHS = {"1 document": [1024], "4 documents": [300, 5, 290, 300], "nothing valid": [1] * 9}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()  # noqa: SLF001  there is no public way to forget compiled code
    compiled_flex.cache_clear()
    yield
    torch._dynamo.reset()  # noqa: SLF001
    compiled_flex.cache_clear()


def batch(lengths: list[int], number: int = 0, *, dtype: torch.dtype = torch.float32) -> StepInputs:
    inputs = step_inputs(lengths, token_budget=BUDGET, supervised_share=0.97)
    inputs = inputs._replace(
        features_TC=inputs.features_TC.to(dtype), batch_number=torch.tensor(number)
    )
    return StepInputs(*(tensor.cuda() for tensor in inputs))


def block_loss(
    attention: Attention, *, checkpoint: bool = False, dtype: torch.dtype = torch.float32
) -> BlockLoss:
    embedding, head = (table.cuda().to(dtype) for table in target_tables())
    return BlockLoss(
        tiny_drafter().cuda(),
        embedding_VD=embedding,
        head=head,
        settings=ObjectiveSettings(chunk_blocks=32),
        num_anchors=ANCHORS,
        seed=0,
        attention=attention,
        checkpoint=checkpoint,
    )


def compiled(loss: BlockLoss) -> BlockLoss:
    for name in COMPILED_PARTS:
        part = torch.compile(getattr(loss, name), fullgraph=True, dynamic=False)
        setattr(loss, name, part)
    return loss


def anchors_on(device: str, inputs: StepInputs) -> Anchors:
    return draw_anchors(
        inputs.loss_mask_T.to(device),
        inputs.documents_T.to(device),
        inputs.positions_T.to(device),
        scores_T=anchor_scores(7, 11, num_positions=BUDGET, device=device),
        num_anchors=ANCHORS,
    )


def gradients_of(loss: BlockLoss, inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss.drafter.zero_grad()
    objective = loss(inputs, with_metrics=False)
    objective.loss_sum.backward()
    named = loss.drafter.named_parameters()
    return objective.loss_sum.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with 8-bit products",
)
def test_a_gradient_in_8_bits_over_a_whole_vocabulary_is_the_product_of_what_was_rounded() -> None:
    """Slopes of one sign, as those of a softmax are but for the label: sums only grow."""
    rows, width, vocab = 64, 128, 151_936
    random = torch.Generator("cuda").manual_seed(0)
    slope = torch.rand(rows, vocab, device="cuda", generator=random)
    head = torch.rand(vocab, width, device="cuda", generator=random).bfloat16()
    small = scaled_head(head)
    found = head_gradient(
        slope,
        small,
        label_R1=torch.zeros(rows, 1, device="cuda", dtype=torch.int64),
        label_slope_R1=slope[:, :1],
        largest_R1=torch.ones(rows, 1, device="cuda"),
        dtype=torch.bfloat16,
    )
    scale = 1 / LARGEST[E5M2]
    of_slope = (slope / scale).to(E5M2).double() * scale
    expected = of_slope @ (small.columns.values.double() * small.columns.scale.double()).t()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0)


def test_cpu_and_gpu_draw_the_same_anchors() -> None:
    for lengths in LENGTHS.values():
        inputs = batch(lengths)
        on_cpu, on_gpu = anchors_on("cpu", inputs), anchors_on("cuda", inputs)
        assert torch.equal(on_gpu.anchors_N.cpu(), on_cpu.anchors_N)
        assert torch.equal(on_gpu.used_N.cpu(), on_cpu.used_N)


@pytest.mark.parametrize("layout", LENGTHS)
def test_compiled_flex_agrees_with_dense_attention_forward_and_backward(layout: str) -> None:
    inputs = batch(LENGTHS[layout])
    anchors = anchors_on("cuda", inputs)
    dense = dense_mask(anchors, inputs.documents_T, block_size=BLOCK)
    starts_T = torch.arange(BUDGET, device="cuda") - inputs.positions_T
    mask = block_mask(anchors, starts_T, block_size=BLOCK)
    random = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 4, dense.shape[0], 64, device="cuda", generator=random)
    k, v = torch.randn(2, 1, 2, dense.shape[1], 64, device="cuda", generator=random)
    leaves = [tensor.requires_grad_() for tensor in (q, k.clone(), v.clone())]
    slope = torch.randn(q.shape, device="cuda", generator=random)
    flex = compiled_flex()(*leaves, block_mask=mask, enable_gqa=True)
    found = [flex, *torch.autograd.grad(flex, leaves, slope)]
    wide = [leaves[0], *(leaf.repeat_interleave(2, 1) for leaf in leaves[1:])]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=dense)
    expected = [exact, *torch.autograd.grad(exact, leaves, slope)]
    for one, other in zip(found, expected, strict=True):
        # TF32 products inside the flex kernel: 10 bits.
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("inlined", [False, True])
def test_flex_training_agrees_with_sdpa_training(*, inlined: bool, checkpoint: bool) -> None:
    loss = block_loss("flex", checkpoint=checkpoint)
    if inlined:
        loss = compiled(loss)
    plain = block_loss("sdpa")
    for number in range(3):
        inputs = batch(LENGTHS["4 documents"], number)
        found, found_gradients = gradients_of(loss, inputs)
        expected, expected_gradients = gradients_of(plain, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
        for name, gradient in expected_gradients.items():
            error = (found_gradients[name] - gradient).norm() / gradient.norm()
            assert error < 2e-2, name


def test_compiled_parts_do_not_recompile_when_anchors_change() -> None:
    loss = compiled(block_loss("flex", dtype=torch.bfloat16))
    gradients_of(loss, batch(LENGTHS["4 documents"], 0, dtype=torch.bfloat16))
    with torch._dynamo.config.patch(error_on_recompile=True):  # noqa: SLF001
        losses = {
            float(gradients_of(loss, batch(LENGTHS["4 documents"], n, dtype=torch.bfloat16))[0])
            for n in range(1, 5)
        }
    assert len(losses) == 4


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_step_never_waits_for_the_host(attention: Attention) -> None:
    loss = block_loss(attention)
    batches = [batch(LENGTHS["4 documents"], number) for number in range(3)]
    gradients_of(loss, batches[0])  # compiles, and creates what libraries create once
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in batches[1:]:
            loss(inputs, with_metrics=True).loss_sum.backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.drafter.parameters())


def test_a_captured_graph_draws_the_anchors_of_its_batch_number() -> None:
    loss = block_loss("flex")
    inputs = batch(LENGTHS["4 documents"])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.prepare(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss.prepare(inputs)
    for number in (3, 8):
        inputs.batch_number.fill_(number)
        graph.replay()
        expected = loss.prepare(inputs)
        assert torch.equal(captured.positions_Q, expected.positions_Q)
        assert torch.equal(captured.weight_NB, expected.weight_NB)
