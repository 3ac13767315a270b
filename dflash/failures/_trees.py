"""Torch's own wiring of cudagraph trees around a manager that captures nothing, for a CPU.

``compile_fx.cudagraphify`` and everything that finds a thread's manager are the real ones.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch

Graph = Callable[[list[str]], object]
"""Called with the name of who runs it; captures on first use, as torch decides by thread."""

CARRIED = ("tree_manager_containers", "tree_manager_locks")
"""What ATen carries from the thread that calls ``backward`` to the autograd thread of a device."""


class StandInManager:
    """In the place of ``CUDAGraphTreeManager``: a capture is the set of those who run it."""

    captured: ClassVar[list[set[str]]] = []

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index

    def add_function(self, _model: object, inputs: list[str], *_rest: Any, **_facts: Any) -> Any:  # noqa: ANN401
        """Capture; return how to replay it and what it gives this time."""
        users: set[str] = set()
        self.captured.append(users)

        def replay(inputs: list[str]) -> None:
            users.update(inputs)

        replay(inputs)
        return replay, None


def stand_in_graph(*, is_backward: bool = False) -> Graph:
    """Return what torch makes of a compiled graph that it is to capture."""
    from torch._inductor import compile_fx, cudagraph_trees

    cudagraph_trees.CUDAGraphTreeManager = StandInManager  # type: ignore[assignment,misc]
    model: Any = None  # only a real manager runs it
    graph: Graph = compile_fx.cudagraphify(
        model,
        (),
        device_index=0,
        stack_traces=[None],
        is_backward=is_backward,
        is_inference=False,
    )
    return graph


class AutogradThread:
    """The one thread in which autograd runs every backward pass of a GPU, whoever calls it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "autograd-cuda:0")

    def run(self, call: Callable[[], object]) -> None:
        """Run *call* there with the caller's entries, as at::ThreadLocalStateGuard does."""
        entries = {
            name: torch._C._get_obj_in_tls(name)  # noqa: SLF001 - has no other name
            for name in CARRIED
            if torch._C._is_key_in_tls(name)  # noqa: SLF001
        }

        def there() -> None:
            for name, entry in entries.items():
                torch._C._stash_obj_in_tls(name, entry)  # noqa: SLF001
            call()

        self._pool.submit(there).result()
