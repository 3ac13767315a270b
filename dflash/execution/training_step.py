"""A ready program around anybody's loss and optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dflash.execution.program import Region

Loss = Callable[[Mapping[str, Tensor]], Tensor]


class TrainingStep:
    """A loss, its gradients ("normal") and the optimizer's move ("update"), as a ``Program``.

    The optimizer must be one whose state starts at zero (Adam, AdamW, SGD) and, for modes that
    capture, be ``capturable=True`` with the learning rate in a tensor: what is a Python number when
    it is captured stays that number. A rehearsal keeps a copy of weights and state for as long as
    it lasts.

    Args:
        loss: returns a 0-d tensor from the static inputs; compiled in compiling modes.
        optimizer: over every parameter that *loss* trains.
        inputs: buffers of the one static shape, on the device; ``Runner.feed`` fills them.
        changed: other tensors that *loss* changes, such as the running statistics of a norm.
    """

    rounds = (("normal", "update"),)

    def __init__(
        self,
        loss: Loss,
        *,
        optimizer: torch.optim.Optimizer,
        inputs: Mapping[str, Tensor],
        changed: Iterable[Tensor] = (),
    ) -> None:
        self.loss = loss
        self.optimizer = optimizer
        self.inputs = dict(inputs)
        self._changed = list(changed)
        self.parameters: list[Tensor] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.device = self.parameters[0].device
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        # It is launched before it is captured, which torch would warn of every time.
        optimizer._warned_capturable_if_run_uncaptured = True  # noqa: SLF001

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        """The two halves of a step; between them gradients may be read or summed."""
        return {"normal": self._normal, "update": self._update}

    def regions(self) -> list[Region]:
        """The loss; the optimizer has kernels of its own."""
        return [Region(self, "loss")]

    def probe(self) -> Tensor:
        """Sums over the steps so far, float64: loss, gradient norm, number of steps."""
        return self.sums.clone()

    def carried(self) -> list[Tensor | None]:
        """The gradients."""
        return [parameter.grad for parameter in self.parameters]

    def carry(self, tensors: Sequence[Tensor | None]) -> None:
        """Let *tensors* be the gradients."""
        for parameter, gradient in zip(self.parameters, tensors, strict=True):
            parameter.grad = gradient

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run parts inside without a trace, in ``sums`` too."""
        kept = [(tensor, tensor.detach().clone()) for tensor in self._state()]
        self.sums.zero_()
        try:
            yield
        finally:
            self._drop_gradients()
            with torch.no_grad():
                for tensor in self._state():
                    tensor.zero_()  # what is new has come to be inside, and starts at zero
                for tensor, before in kept:
                    tensor.copy_(before)

    def _normal(self) -> None:
        loss = self.loss(self.inputs)
        loss.backward()
        self.sums[0] += loss.detach()

    def _update(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.sums[1] += torch.nn.utils.get_total_norm(gradients)
        self.sums[2] += 1
        self.optimizer.step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        states = self.optimizer.state.values()
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return [*self.parameters, *tensors, *self._changed, self.sums]
