"""One drafter's training step on one device: gradients of a batch, then one optimizer move.

No logging, no I/O and no host synchronisation in here: what the host wants to know is summed on
the device and read by ``dflash.train.totals``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.training import COMPILED_PARTS, BlockLoss, StepInputs
from dflash.execution import Region
from dflash.train.totals import Totals

ROUNDS = (("normal", "update"), ("metric", "update"))
ROUNDS_OF_SEVERAL = (("normal", "normal_add", "update"), ("metric", "metric_add", "update"))


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW (arXiv 1711.05101) with a clip on the global gradient norm."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


class TrainStep:
    """The program (``dflash.execution.Program``) of one drafter worker.

    It reads ``batch``, buffers of its own. ``normal`` and ``metric`` start a step, ``normal_add``
    and ``metric_add`` add a further micro-batch to it; each leaves the gradients of the *summed*
    loss. ``update`` divides once, by the summed weight of all
    micro-batches and replicas, inside the fused optimizer kernel, together with the clip. A
    non-finite loss or norm sets ``blocked`` and from then on no update moves a weight.
    """

    def __init__(
        self,
        loss: BlockLoss,
        settings: AdamSettings,
        *,
        token_budget: int,
        features_dtype: torch.dtype,
        accumulates: bool = False,
    ) -> None:
        self.loss = loss
        self.settings = settings
        self.device = loss.embedding_VD.device
        shape = loss.drafter.shape
        self.batch = StepInputs.allocate(
            token_budget,
            shape.num_taps * shape.hidden_size,
            device=self.device,
            dtype=features_dtype,
        )
        self.rounds = ROUNDS_OF_SEVERAL if accumulates else ROUNDS
        self.named = dict(loss.drafter.named_parameters())
        self.parameters = list(self.named.values())
        self.lr = torch.zeros((), device=self.device)
        self.lr_now = 0.0
        self.totals = Totals(loss.block_size, self.device)
        self.blocked = torch.zeros((), device=self.device)
        self._divisor = torch.ones((), device=self.device)
        self.optimizer = self._make_optimizer()

    @property
    def loss_sum(self) -> Tensor:
        """Float64, 0-d, of the step in progress."""
        return self.totals.loss_sum

    @property
    def weight_sum(self) -> Tensor:
        """Float64, 0-d, of the step in progress."""
        return self.totals.weight_sum

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors of ``batch`` by name."""
        return self.batch._asdict()

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        """A normal batch, a batch that also measures, a further one, and the optimizer's move."""
        return {
            "normal": self._normal,
            "metric": self._metric,
            "normal_add": self._normal,
            "metric_add": self._metric,
            "update": self._update,
        }

    def gradients(self) -> list[Tensor]:
        """What the sum over drafters must add up, after the last micro-batch of a step."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(found) == len(self.parameters), "a trained parameter has no gradient"
        return found

    def probe(self) -> Tensor:
        """All sums since they were last dropped, float64: loss, weight, gradient norms and more."""
        return self.totals.sums.clone()

    def regions(self) -> list[Region]:
        """What a compiling mode compiles: everything but autograd and the optimizer's kernel."""
        return [Region(self.loss, name) for name in COMPILED_PARTS]

    def set_lr(self, lr: float) -> None:
        """Use *lr* from the next update on; a kernel argument, so nothing waits."""
        self.lr_now = lr
        self.lr.fill_(lr)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run parts inside without a trace: updates are blocked, gradients and sums dropped."""
        self.blocked.fill_(1.0)
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.blocked.zero_()
            self.totals.step_sums.zero_()
            self.totals.zero()

    def _normal(self) -> None:
        self._backward(with_metrics=False)

    def _metric(self) -> None:
        self._backward(with_metrics=True)

    def _backward(self, *, with_metrics: bool) -> None:
        objective = self.loss(self.batch, with_metrics=with_metrics)
        objective.loss_sum.backward()
        self.totals.add(objective)

    @torch.no_grad()
    def _update(self) -> None:
        weight = self.weight_sum.float().clamp(min=torch.finfo(torch.float32).tiny)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) / weight
        finite = norm.isfinite() & self.loss_sum.isfinite()
        torch.maximum(self.blocked, 1.0 - finite.float(), out=self.blocked)
        clip = (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self._divisor.copy_(weight / clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.totals.end_step(norm)

    def _make_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters if p.ndim >= 2]  # noqa: PLR2004 - a matrix has 2 axes
        vectors = [p for p in self.parameters if p.ndim < 2]  # noqa: PLR2004
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
        )
        # The fused kernel divides every gradient by grad_scale and moves nothing where found_inf
        # is 1. torch.amp sets the same two attributes; here they carry clip, weight and blocking.
        optimizer.grad_scale = self._divisor  # type: ignore[attr-defined]
        optimizer.found_inf = self.blocked  # type: ignore[attr-defined]
        for parameter in self.parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state by flat name: ``exp_avg.X``, ``exp_avg_sq.X``, and ``step``."""
        state = self.optimizer.state
        found = {
            f"{kind}.{name}": state[parameter][kind]
            for name, parameter in self.named.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return found | {"step": state[self.parameters[0]]["step"]}

    @torch.no_grad()
    def load_moments(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the optimizer's state with what ``moments`` once returned."""
        for name, into in self.moments().items():
            into.copy_(tensors[name])
        for parameter in self.parameters[1:]:
            self.optimizer.state[parameter]["step"].copy_(tensors["step"])
