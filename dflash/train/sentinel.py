"""Notices, without making the step wait, that a loss or gradient norm was not finite."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash.errors import NonFiniteError
from dflash.pipeline.slots import BatchFacts

NAMED_ROWS = 8
MAX_OUTSTANDING = 4
"""Steps the host may run ahead of the device; also what keeps its queue of work short."""


@dataclass(frozen=True, slots=True)
class _Outstanding:
    step: int
    rows: tuple[int, ...]
    flag: Tensor
    arrived: torch.cuda.Event | None


class Sentinel:
    """Reads the device's ``blocked`` flag a few steps late.

    Lateness is harmless: the flag itself has already kept the optimizer from moving.
    """

    def __init__(
        self, name_row: Callable[[int], str], *, newest: Callable[[], Path | None]
    ) -> None:
        self._name_row = name_row
        self._newest = newest
        self._queue: deque[_Outstanding] = deque()

    def watch(self, step: int, blocked: Tensor, batches: list[BatchFacts]) -> None:
        """Queue a look at *blocked* as it is after *step*, and look at what has arrived.

        Raises:
            NonFiniteError: names the first step whose flag was set, and its documents.
        """
        arrived = None
        if blocked.is_cuda:
            flag = torch.empty((), pin_memory=True)
            flag.copy_(blocked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            flag = blocked.clone()
        rows = tuple(row for facts in batches for row in facts.rows)
        self._queue.append(_Outstanding(step, rows, flag, arrived))
        self.look(at_most=MAX_OUTSTANDING)

    def look(self, *, at_most: int = 0) -> None:
        """Check every flag that has arrived, waiting until *at_most* are outstanding."""
        while self._queue:
            first = self._queue[0]
            if first.arrived is not None and not first.arrived.query():
                if len(self._queue) <= at_most:
                    return
                first.arrived.synchronize()
            self._queue.popleft()
            if float(first.flag):
                self._raise(first)

    def _raise(self, bad: _Outstanding) -> None:
        names = [self._name_row(row) for row in dict.fromkeys(bad.rows)]
        more = len(names) - NAMED_ROWS
        shown = ", ".join(names[:NAMED_ROWS]) + (f" and {more} more" if more > 0 else "")
        newest = self._newest()
        kept = (
            f"the last checkpoint is {newest.name} (if going on from it fails too, begin in another"
            " --run-dir)"
            if newest
            else "there is no checkpoint yet"
        )
        raise NonFiniteError(
            f"step {bad.step}: the loss or the gradient norm is not finite; no weight was changed"
            f" by it; its documents: {shown}",
            hint=f"{kept}; look at these documents with"
            " `dflash data inspect`, lower optim.lr, or leave them out",
        )
