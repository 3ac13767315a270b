"""One drafter's training step on one device: gradients of a batch, then one optimizer move.

No logging, no I/O and no host synchronisation in here: what the host wants to know is summed on
the device and read by ``dflash.train.totals``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from dflash.drafter.training import COMPILED_PARTS, BlockLoss, StepInputs
from dflash.execution import Region
from dflash.train.adamw import AdamSettings, MasterAdamW, adamw_for
from dflash.train.totals import Totals

ROUNDS = (("normal", "update"), ("metric", "update"))
ROUNDS_OF_SEVERAL = (("normal", "normal_add", "update"), ("metric", "metric_add", "update"))


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
        self.device = loss.embedding_VD.device
        shape = loss.drafter.shape
        self.batch = StepInputs.allocate(
            token_budget,
            shape.num_taps * shape.hidden_size,
            device=self.device,
            dtype=features_dtype,
        )
        self.rounds = ROUNDS_OF_SEVERAL if accumulates else ROUNDS
        named = dict(loss.drafter.named_parameters())
        self.adam = adamw_for(named, settings, compute=loss.embedding_VD.dtype)
        self.parameters = list(named.values())
        self.lr_now = 0.0
        self.totals = Totals(loss.block_size, self.device)
        # bf16 sums of micro-batches would lose what each adds; one batch's gradient is exact in it
        self._sums = (
            [torch.zeros_like(master) for master in self.masters.values()]
            if accumulates and loss.embedding_VD.dtype != torch.float32
            else None
        )

    @property
    def masters(self) -> dict[str, Tensor]:
        """The fp32 weights by name: what a checkpoint keeps."""
        return self.adam.masters

    @property
    def blocked(self) -> Tensor:
        """float32, 0-d: 1 from the first non-finite loss or norm on."""
        return self.adam.blocked

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
            "normal": partial(self._start, with_metrics=False),
            "metric": partial(self._start, with_metrics=True),
            "normal_add": partial(self._add, with_metrics=False),
            "metric_add": partial(self._add, with_metrics=True),
            "update": self._update,
        }

    def gradients(self) -> list[Tensor]:
        """What the sum over drafters must add up, after the last micro-batch of a step."""
        if self._sums is not None:
            return self._sums
        return self._batch_gradients()

    def probe(self) -> Tensor:
        """All sums since they were last dropped, float64: loss, weight, gradient norms and more."""
        return self.totals.sums.clone()

    def carried(self) -> list[Tensor | None]:
        """What a part leaves for the next one: the parameters' gradients."""
        return [parameter.grad for parameter in self.parameters]

    def carry(self, tensors: Sequence[Tensor | None]) -> None:
        """Let *tensors* be the parameters' gradients."""
        for parameter, gradient in zip(self.parameters, tensors, strict=True):
            parameter.grad = gradient

    def regions(self) -> list[Region]:
        """What a compiling mode compiles: everything but autograd; the optimizer's move always."""
        frozen = tuple(self.loss.frozen)
        regions = [Region(self.loss, name, constants=frozen) for name in COMPILED_PARTS]
        if isinstance(self.adam, MasterAdamW):
            regions.append(Region(self.adam, "kernel", kernel=True, dynamic=True))
        return regions

    def set_lr(self, lr: float) -> None:
        """Use *lr* from the next update on; a kernel argument, so nothing waits."""
        self.lr_now = lr
        self.adam.lr.fill_(lr)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run parts inside without a trace: no update moves, and sums are put back."""
        kept = (self.blocked, self.totals.sums, self.totals.step_sums)
        before = [tensor.clone() for tensor in kept]
        self.totals.zero()
        self.totals.step_sums.zero_()
        self.blocked.fill_(1.0)
        try:
            yield
        finally:
            self._drop_gradients()
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)

    def load(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Overwrite weights and optimizer state with what ``masters`` and ``moments`` once gave."""
        self.adam.load(masters, moments)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state by flat name: ``exp_avg.X``, ``exp_avg_sq.X``, and ``step``."""
        return self.adam.moments()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _start(self, *, with_metrics: bool) -> None:
        self._backward(with_metrics=with_metrics)
        if self._sums is not None:
            torch._foreach_copy_(self._sums, self._batch_gradients())
            self._drop_gradients()

    def _add(self, *, with_metrics: bool) -> None:
        self._backward(with_metrics=with_metrics)
        if self._sums is not None:
            torch._foreach_add_(self._sums, self._batch_gradients())
            self._drop_gradients()

    def _backward(self, *, with_metrics: bool) -> None:
        objective = self.loss(self.batch, with_metrics=with_metrics)
        objective.loss_sum.backward()
        self.totals.add(objective)

    def _batch_gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(found) == len(self.parameters), "a trained parameter has no gradient"
        return found

    @torch.no_grad()
    def _update(self) -> None:
        adam, gradients = self.adam, self.gradients()
        weight = self.weight_sum.float().clamp(min=torch.finfo(torch.float32).tiny)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / weight
        finite = norm.isfinite() & self.loss_sum.isfinite()
        torch.maximum(adam.blocked, 1.0 - finite.float(), out=adam.blocked)
        clip = (adam.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        adam.divisor.copy_(weight / clip)
        adam.move(gradients)
        self._drop_gradients()
        self.totals.end_step(norm)
