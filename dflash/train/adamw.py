"""AdamW on fp32 master weights, with the clip, the loss' weight and the blocking inside its kernel.

Where the drafter computes in fp32 its parameters are the masters, and torch's fused kernel moves
them. Where it computes in bf16 the parameters are bf16 copies and gradients arrive in bf16: one
kernel reads the gradient (2 bytes), master and both moments (12) and writes them back with the new
copy (14), 28 bytes a parameter and no cast before or after. Inductor writes that kernel from
``_mover``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW (arXiv 1711.05101) with a clip on the global gradient norm."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


class AdamW(ABC):
    """The state of one replica's optimizer, and its one move.

    Attributes:
        masters: fp32, by parameter name.
        means, squares: fp32 moments, in the order of ``masters``.
        lr: float32, 0-d; a kernel argument, so that changing it makes nothing wait.
        divisor: float32, 0-d; every gradient is divided by it first.
        blocked: float32, 0-d; where it is 1 a move changes nothing, the step count included.
    """

    def __init__(self, masters: Mapping[str, Tensor], settings: AdamSettings) -> None:
        self.masters = dict(masters)
        self.settings = settings
        first = next(iter(self.masters.values()))
        self.means = [torch.zeros_like(master) for master in self.masters.values()]
        self.squares = [torch.zeros_like(master) for master in self.masters.values()]
        self.lr = torch.zeros((), device=first.device)
        self.divisor = torch.ones((), device=first.device)
        self.blocked = torch.zeros((), device=first.device)

    @abstractmethod
    def move(self, gradients: Sequence[Tensor]) -> None:
        """Move every master by its gradient, in the order of ``masters``; no host sync."""

    @property
    @abstractmethod
    def step_count(self) -> Tensor:
        """float32, 0-d: moves made so far."""

    @abstractmethod
    def refresh(self, step_count: Tensor) -> None:
        """Take up masters and moments that were written from outside after *step_count* moves."""

    def decay_of(self, master: Tensor) -> float:
        """Weight decay: of matrices only; norms and biases have none."""
        return self.settings.weight_decay if master.ndim >= 2 else 0.0  # noqa: PLR2004 - a matrix has 2 axes

    def moments(self) -> dict[str, Tensor]:
        """State by flat name: ``exp_avg.X``, ``exp_avg_sq.X``, and ``step``."""
        means = {f"exp_avg.{n}": t for n, t in zip(self.masters, self.means, strict=True)}
        squares = {f"exp_avg_sq.{n}": t for n, t in zip(self.masters, self.squares, strict=True)}
        return means | squares | {"step": self.step_count}

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Overwrite everything with what ``masters`` and ``moments`` once returned."""
        for name, master in self.masters.items():
            master.copy_(masters[name])
        for name, moment in self.moments().items():
            moment.copy_(moments[name])
        self.refresh(self.step_count)


def adamw_for(
    parameters: Mapping[str, nn.Parameter], settings: AdamSettings, *, compute: torch.dtype
) -> AdamW:
    """Return the optimizer of fp32 *parameters*; they become copies in another *compute* dtype."""
    if compute == torch.float32:
        return FusedAdamW(parameters, settings)
    return MasterAdamW(parameters, settings, compute)


class FusedAdamW(AdamW):
    """Parameters in fp32 are their own masters: torch's fused kernel, on a CPU too."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamSettings) -> None:
        super().__init__(parameters, settings)
        self._parameters = list(parameters.values())
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            groups.setdefault(self.decay_of(parameter), []).append(parameter)
        self._torch = torch.optim.AdamW(
            [{"params": some, "weight_decay": decay} for decay, some in groups.items()],
            lr=self.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
            capturable=self.lr.is_cuda,
        )
        # It is launched before it is captured, of which torch would warn.
        self._torch._warned_capturable_if_run_uncaptured = True  # noqa: SLF001
        # The fused kernel divides every gradient by grad_scale and moves nothing where found_inf
        # is 1. torch.amp sets the same two attributes; here they carry clip, weight and blocking.
        self._torch.grad_scale = self.divisor  # type: ignore[attr-defined]
        self._torch.found_inf = self.blocked  # type: ignore[attr-defined]
        moments = zip(self._parameters, self.means, self.squares, strict=True)
        for parameter, mean, square in moments:
            self._torch.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": mean,
                "exp_avg_sq": square,
            }

    @property
    def step_count(self) -> Tensor:
        count: Tensor = self._torch.state[self._parameters[0]]["step"]
        return count

    def refresh(self, step_count: Tensor) -> None:
        for parameter in self._parameters[1:]:
            self._torch.state[parameter]["step"].copy_(step_count)

    def move(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._torch.step()


class MasterAdamW(AdamW):
    """Parameters become copies of fp32 masters in *dtype*; gradients may be of either."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: AdamSettings, dtype: torch.dtype
    ) -> None:
        super().__init__({name: p.detach() for name, p in parameters.items()}, settings)
        # One parameter at a time: the masters' memory is the parameters' own.
        for parameter in parameters.values():
            parameter.data = parameter.data.to(dtype)
        self._copies = [parameter.data for parameter in parameters.values()]
        device = self.lr.device
        self._count = torch.zeros((), device=device)
        self._decay = {
            decay: torch.full((), decay, device=device) for decay in (settings.weight_decay, 0.0)
        }
        self.kernel = _mover(settings.betas, settings.eps)

    @property
    def step_count(self) -> Tensor:
        return self._count

    @torch.no_grad()
    def refresh(self, step_count: Tensor) -> None:
        self._count.copy_(step_count)
        for copy, master in zip(self._copies, self.masters.values(), strict=True):
            copy.copy_(master)

    @torch.no_grad()
    def move(self, gradients: Sequence[Tensor]) -> None:
        beta1, beta2 = self.settings.betas
        self._count.add_(1.0 - self.blocked)
        scalars = _Scalars(
            lr=self.lr,
            unbias_mean=1.0 - beta1**self._count,
            unbias_square=1.0 - beta2**self._count,
            divisor=self.divisor,
            blocked=self.blocked,
        )
        masters = self.masters.values()
        tensors = zip(self._copies, masters, gradients, self.means, self.squares, strict=True)
        for of_one in tensors:
            decay = self._decay[self.decay_of(of_one[1])]
            self.kernel(*(tensor.view(-1) for tensor in of_one), decay=decay, scalars=scalars)


class _Scalars(NamedTuple):
    """float32, 0-d, on the device: what changes from move to move."""

    lr: Tensor
    unbias_mean: Tensor
    unbias_square: Tensor
    divisor: Tensor
    blocked: Tensor


def _mover(betas: tuple[float, float], eps: float) -> Callable[..., None]:
    """Return algorithm 2 of arXiv 1711.05101 for one parameter, in fp32, all in place."""
    beta1, beta2 = betas

    def move(  # noqa: PLR0917  flat tensors of one parameter
        copy_n: Tensor,
        master_n: Tensor,
        gradient_n: Tensor,
        mean_n: Tensor,
        square_n: Tensor,
        *,
        decay: Tensor,
        scalars: _Scalars,
    ) -> None:
        gradient = gradient_n.float() / scalars.divisor
        mean = mean_n + (gradient - mean_n) * (1.0 - beta1)
        square = square_n * beta2 + gradient * gradient * (1.0 - beta2)
        size = (square / scalars.unbias_square).sqrt() + eps
        stepped = master_n * (1.0 - scalars.lr * decay)
        stepped -= scalars.lr * (mean / scalars.unbias_mean) / size
        stay = scalars.blocked > 0
        mean_n.copy_(torch.where(stay, mean_n, mean))
        square_n.copy_(torch.where(stay, square_n, square))
        master_n.copy_(torch.where(stay, master_n, stepped))
        copy_n.copy_(master_n)

    return move
