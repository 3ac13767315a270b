"""How long a process was compiling, whichever thread did, and whatever asked for it."""

import time
from typing import Any

from torch._dynamo.callback import CallbackTrigger, callback_handler


class CompileClock:
    """Seconds in torch.compile since it was made: tracing, and backward passes at their first use.

    Threads that compile at the same time count once. Recording a graph is no compiling.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def _begin(self, arguments: Any) -> None:  # noqa: ANN401 - torch's own
        if arguments.callback_trigger is not CallbackTrigger.CUDAGRAPH_RECORDING:
            self._since = time.perf_counter()

    def _end(self, _arguments: Any) -> None:  # noqa: ANN401 - torch's own
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None
