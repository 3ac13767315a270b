"""What the pages about threads share: a drafter's threads as the pipeline starts them, and a step.

The step is a real ``TrainingStep``. Its loss is compiled by a backend that generates no code, since
these failures happen before that: a launch takes a second and needs no C++ compiler.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.execution import Region, TrainingStep
from dflash.pipeline.gate import Gate, Opening
from dflash.pipeline.lifeline import Lifeline
from dflash.pipeline.supervisor import Worker, supervise

FOREVER_S = 3600.0
"""How long silence may last: the limit of a launch decides that, not the pipeline's watchdog."""

Body = Callable[[], None]


def run_workers(bodies: Sequence[Body], *, enter: Sequence[Body] = ()) -> None:
    """Run *bodies* at once, each in a drafter's thread behind the gate, until all have returned.

    Args:
        enter: what each thread does first, one after another, as runners enter their workers.

    Raises:
        WorkerDiedError: from what ended a worker first.
    """
    life = Lifeline()
    gate = Gate(Opening(enter), len(bodies), life)
    workers = [
        Worker(f"drafter-{number}", gate.entered(number, body), decisive=True)
        for number, body in enumerate(bodies)
    ]
    supervise(workers, life, watchdog_s=FOREVER_S, stacks_file=None)


class SmallStep(TrainingStep):
    """Linear layers of *width* on a batch as large, their gradients and AdamW's move."""

    def __init__(
        self,
        *,
        seed: int,
        width: int = 16,
        num_layers: int = 2,
        device: str = "cpu",
        backend: str | Callable[..., Any] = "aot_eager",
        before: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(num_layers)))
        self.backend = backend

        def loss(inputs: Any) -> Tensor:  # noqa: ANN401 - tensors by name
            output: Tensor = model(before(inputs["x"]))
            return output.square().mean()

        lr = torch.tensor(1e-3, device=device)
        parameters, on_cuda = model.parameters(), device != "cpu"
        super().__init__(
            loss,
            optimizer=torch.optim.AdamW(parameters, lr=lr, fused=True, capturable=on_cuda),
            inputs={"x": torch.randn(width, width, device=device)},
        )

    def regions(self) -> list[Region]:
        """The loss."""
        return [Region(self, "loss", backend=self.backend)]

    def gradients_of(self, x: Tensor, *, loss: Callable[..., Tensor]) -> list[Tensor]:
        """Return the parameters' gradients of *loss*, compiled or not, as one marked step."""
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(loss({"x": x}), self.parameters)
        return [gradient.clone() for gradient in found]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to each one's largest."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


class CompiledCalls:
    """Counts calls of compiled code."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def backend(self, graph: Callable[..., Any], _examples: list[Tensor]) -> Callable[..., Any]:
        """Compile *graph* by counting its calls."""

        def call(*arguments: Tensor) -> Any:  # noqa: ANN401 - whatever the graph returns
            with self._lock:
                self.count += 1
            return graph(*arguments)

        return call
