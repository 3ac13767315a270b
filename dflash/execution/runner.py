"""The runner makes a program ready in one mode; then one worker thread feeds and calls it."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dflash.execution.compiling import num_compiled, num_skipped
from dflash.execution.faults import CaptureError, recompile_error
from dflash.execution.graphed import Graphed
from dflash.execution.launched import Launched
from dflash.execution.modes import CAPTURING, Mode
from dflash.execution.program import Program
from dflash.execution.report import WarmUp
from dflash.execution.rounds import Order, synchronize
from dflash.execution.signature import check_signature
from dflash.execution.streams import on_stream
from dflash.execution.trees import Trees


class _Execution(Protocol):
    """How one mode does it; everything happens with the runner's stream as the current one."""

    def warm_up(self) -> WarmUp: ...

    def enter_worker(self) -> WarmUp: ...

    def run(self, part: str) -> None: ...

    def close(self) -> None: ...


class Runner:
    """A program in one execution mode.

    Build it and call ``warm_up`` in the main thread before any worker exists: that is where the
    first compilation of the process must happen. Then one worker thread calls ``enter_worker``,
    one worker at a time and while nothing else uses the device, and ``feed`` and parts for as long
    as it lives, with ``stream`` as its current stream.

    Args:
        program: what to run.
        mode: how.
        stream: of the program's device; made here when there is none.
        unsafe: let "reduce-overhead" run where it is known to die.

    Raises:
        CaptureError: *mode* captures graphs and the device is none that can.
    """

    def __init__(
        self,
        program: Program,
        mode: Mode,
        *,
        stream: torch.cuda.Stream | None = None,
        unsafe: bool = False,
    ) -> None:
        self.program = program
        self.mode = mode
        if stream is None and program.device.type == "cuda":
            stream = torch.cuda.Stream(program.device)
        self.stream = stream
        self.report = WarmUp()
        self._inputs = dict(program.inputs)
        self._order = Order(program.rounds)
        self._execution = _execution_of(program, mode, stream=stream, unsafe=unsafe)

    def warm_up(self) -> None:
        """Run every round on the inputs as they are until it is ready to be called; no trace.

        Raises:
            CaptureError: something cannot be captured; ``close`` leaves nothing of it.
            NumericsError: a replay gives other numbers than the launched kernels.
        """
        self.report = self._measured(self._execution.warm_up)

    def enter_worker(self) -> None:
        """Called once by the thread that will call this runner; checks a replay from there.

        What must be captured by that thread is captured now, which joins the report.

        Raises:
            CaptureError, NumericsError: as ``warm_up`` does.
        """
        self.report = self.report.then(self._measured(self._execution.enter_worker))

    def feed(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy *tensors* into the program's inputs, on the current stream.

        Raises:
            SealedError: names the tensor and both shapes, dtypes or strides.
        """
        check_signature(tensors, self._inputs)
        for name, into in self._inputs.items():
            into.copy_(tensors[name], non_blocking=True)

    def __call__(self, part: str) -> None:
        """Run one part; asynchronous on a CUDA device.

        Raises:
            ValueError: it does not come next in any round.
            SealedError: it would have had to compile while the process is sealed.
        """
        self._order.follow(part)
        try:
            self._execution.run(part)
        except RuntimeError as error:
            if "fail_on_recompile" in str(error):
                raise recompile_error(part, error) from error
            raise

    def close(self) -> None:
        """Free graphs and put the program's functions back."""
        self._execution.close()

    def _measured(self, make_ready: Callable[[], WarmUp]) -> WarmUp:
        """What *make_ready* reports, with the seconds and the counts of the process."""
        started, compiled, skipped = time.perf_counter(), num_compiled(), num_skipped()
        synchronize(self.program.device)
        with on_stream(self.stream):
            report = make_ready()
        synchronize(self.program.device)
        return report.with_(
            warm_up_s=time.perf_counter() - started,
            num_compiled=num_compiled() - compiled,
            num_skipped=num_skipped() - skipped,
        )


def _execution_of(
    program: Program, mode: Mode, *, stream: torch.cuda.Stream | None, unsafe: bool
) -> _Execution:
    if mode not in CAPTURING:
        return Launched(program, compiled=mode == "compiled")
    if stream is None:
        raise CaptureError(
            f'mode "{mode}" captures CUDA graphs, but the program runs on {program.device}',
            hint='use "compiled" or "eager" there',
        )
    if mode == "graphed":
        return Graphed(program, stream)
    return Trees(program, warmed=mode == "warmed", unsafe=unsafe)
