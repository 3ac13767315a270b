"""The loss of one batch under the frozen head, forward and backward to the hidden states.

``chunked`` is what steps run; ``full-logits`` is the same loss as most would write it: all logits
of slots 1 to B - 1 at once, torch's own cross-entropy, autograd. Either also compiled.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from dflash.drafter.head import head_for
from dflash.drafter.objective import ObjectiveSettings, block_objective, chunk_loss, slot_weights
from dflash.train.memory import GIB
from dflash_bench.cases import MODES
from dflash_bench.cases._case import Case, Found, Setting, first_device
from dflash_bench.cases._repeated import Repeated, Run, Work
from dflash_bench.flop import step_flop
from dflash_bench.planned import dtype_on

BYTES_BESIDE_LOGITS = 12
"""A logit, uncompiled, in the backward pass: log-softmax, its gradient, the logits'; all fp32."""

LossOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Hidden states -> sum of weighted losses, sum of weights."""


def full_logits_loss(
    hidden_QD: Tensor, head_VD: Tensor, labels_NB: Tensor, *, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """Return loss and weight sums by all logits at once; every slot but slot 0 is supervised."""
    num_blocks, block_size = labels_NB.shape
    rows_RD = hidden_QD.view(num_blocks, block_size, -1)[:, 1:].flatten(0, 1)
    labels = labels_NB[:, 1:]
    logits_RV = F.linear(rows_RD, head_VD).float()
    ce = F.cross_entropy(logits_RV, labels.reshape(-1), reduction="none").view(labels.shape)
    weight = slot_weights(ce, torch.ones_like(labels, dtype=torch.bool), settings=settings)
    return (weight * ce).sum(), weight.sum()


def make_work(setting: Setting) -> Work:
    """Make loss and gradient of one random batch again and again."""
    device, shape = torch.device(setting.devices[0]), setting.shape
    dtype, width = dtype_on(setting.devices[0]), shape.drafter.hidden_size
    random = torch.Generator(device).manual_seed(setting.seed)
    slots = shape.num_anchors * shape.drafter.block_size
    hidden_QD = torch.randn(slots, width, device=device, dtype=dtype, generator=random)
    hidden_QD.requires_grad_()
    head_VD = torch.empty(shape.drafter.vocab_size, width, device=device, dtype=dtype)
    head_VD.normal_(std=0.02, generator=random)
    labels_NB = torch.randint(
        0,
        shape.drafter.vocab_size,
        (shape.num_anchors, shape.drafter.block_size),
        device=device,
        generator=random,
    )
    loss_of = _loss_function(setting, head_VD, labels_NB)
    losses: list[Tensor] = []

    def run(_number: int) -> None:
        hidden_QD.grad = None
        loss_sum, weight_sum = loss_of(hidden_QD)
        loss = loss_sum / weight_sum
        loss.backward()
        losses[:] = [loss.detach()]

    def finish() -> Found:
        assert hidden_QD.grad is not None, "no step was made"
        norm = float(hidden_QD.grad.float().norm())
        return {"loss": float(losses[0]), "loss_steps": 1, "more": {"gradient norm": norm}}

    def make_ready() -> Run:
        run(0)
        return run

    supervised = float(slots - shape.num_anchors)
    return Work(
        make_ready=make_ready, device=device, units=lambda _number: supervised, finish=finish
    )


def _loss_function(setting: Setting, head_VD: Tensor, labels_NB: Tensor) -> LossOf:
    settings, compiled = setting.shape.objective, setting.mode.endswith("compiled")
    if setting.mode.startswith("full"):
        full = torch.compile(full_logits_loss, dynamic=False) if compiled else full_logits_loss
        return lambda hidden_QD: full(hidden_QD, head_VD, labels_NB, settings=settings)
    chunk = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss
    weight_NB = torch.ones_like(labels_NB, dtype=torch.bool)
    weight_NB[:, 0] = False
    head = head_for(head_VD, setting.matmul)

    def chunked(hidden_QD: Tensor) -> tuple[Tensor, Tensor]:
        found = block_objective(
            hidden_QD,
            head,
            labels_NB,
            weight_NB=weight_NB,
            settings=settings,
            with_metrics=False,
            chunk=chunk,
        )
        return found.loss_sum, found.weight_sum

    return chunked


def why_not(setting: Setting) -> str:
    """Lengths make no difference; all logits at once are made in the compute dtype only."""
    if setting.lengths == "variable":
        return "a batch has N blocks, however long its documents are"
    if setting.matmul != "bf16" and setting.mode.startswith("full"):
        return "the full logits are made in bf16 only"
    return ""


def planned_gib(setting: Setting) -> float | None:
    """Of the uncompiled forms; a compiler keeps what it likes."""
    if setting.mode.endswith("compiled"):
        return None
    shape, size = setting.shape, dtype_on(setting.devices[0]).itemsize
    blocks = shape.num_anchors
    if setting.mode == "chunked":
        blocks = min(shape.objective.chunk_blocks, blocks)
    per_logit = BYTES_BESIDE_LOGITS if setting.mode == "full-logits" else 12 + 2 * size
    rows = shape.num_anchors * shape.drafter.block_size
    hidden = 4 * rows * shape.drafter.hidden_size * size
    head = shape.drafter.vocab_size * shape.drafter.hidden_size * size
    logits = blocks * (shape.drafter.block_size - 1) * shape.drafter.vocab_size
    return (hidden + head + logits * per_logit) / GIB


def head_flop(setting: Setting) -> float:
    """Logits and dX of slots 1 to B - 1."""
    return step_flop(setting.shape).lm_head


def make_subject(setting: Setting) -> Repeated:
    """Return the subject of one process."""
    return Repeated(setting, make_work)


CASE = Case(
    name="objective",
    help="the loss under the frozen head, forward and backward",
    make=make_subject,
    devices=first_device,
    modes=MODES["objective"],
    unit="slot",
    why_not=why_not,
    flop=head_flop,
    planned_gib=planned_gib,
)
