"""A step's body as a CUDA graph: warmed up, checked for host reads, captured in this thread."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.decode.rows import NotStaticError
from dflash.errors import DflashError
from dflash.execution.graphs import capture
from dflash.execution.streams import on_stream

ATTEMPTS = 2
"""A thread that waits for the whole device meanwhile breaks a capture; once may be bad luck."""


class Capturer:
    """Captures bodies of one device into one memory pool, on one stream."""

    def __init__(self, device: torch.device, *, warm_up_runs: int) -> None:
        self._device = device
        self._warm_up_runs = warm_up_runs
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Warm the body up and capture it; the result replays it on the caller's stream.

        Raises:
            NotStaticError: it reads a number on the host.
            CaptureError: of ``dflash.execution``: it cannot be captured.
        """
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with on_stream(self._stream):
            with NoHostReads():  # type: ignore[no-untyped-call]  # torch's own class has no types
                body()
            for _ in range(self._warm_up_runs - 1):
                body()
        graph = self._capture(body, ATTEMPTS)
        caller.wait_stream(self._stream)
        return graph.replay

    def _capture(self, body: Callable[[], None], attempts: int) -> torch.cuda.CUDAGraph:
        if not self._graphs:  # a pool's handle dies with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = capture(
                body, device=self._device, stream=self._stream, pool=self._pool, what="a step"
            )
        except DflashError:
            if attempts == 1:
                raise
            return self._capture(body, attempts - 1)
        self._graphs.add(graph)
        return graph

    @property
    def pool_bytes(self) -> int:
        """What the graphs' intermediate results hold of the device's memory."""
        if not self._graphs:
            return 0
        segments = torch.cuda.memory_snapshot()
        mine = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        return sum(int(segment["total_size"]) for segment in mine)


class NoHostReads(TorchDispatchMode):
    """Refuses operations that read the device on the host, before a capture would fail on them.

    Raises:
        NotStaticError: naming the operation.
    """

    def __torch_dispatch__(  # noqa: PLR0917 (torch dictates it)
        self,
        func: Any,  # noqa: ANN401 (torch dictates it)
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1]
        )
        if name in READS_ON_THE_HOST or by_mask:
            raise NotStaticError(f"the step reads the device on the host: {func}")
        out = func(*args, **kwargs or {})
        if name in {"_to_copy", "copy_"} and isinstance(out, Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != out.device.type:
                raise NotStaticError(f"the step copies between host and device: {func}")
        return out


READS_ON_THE_HOST = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
})  # fmt: skip
