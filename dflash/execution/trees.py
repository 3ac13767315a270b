"""``reduce-overhead`` and ``warmed``: torch captures the compiled regions by itself.

The state of torch's cudagraph trees is the process's, not the program's: a step mark in any thread
ends every thread's step, so that another drafter's live outputs count as overwritten. Parts of all
programs therefore take turns on the host; on their devices they still overlap.
"""

import sys
import threading

import torch
from torch import Tensor

from dflash.execution.captures import capture_watch
from dflash.execution.compiling import compile_regions, first_compile, num_skipped
from dflash.execution.faults import CaptureError
from dflash.execution.program import Program
from dflash.execution.report import WarmUp
from dflash.execution.rounds import TOLERANCE, Rehearsed, check_same, rehearse
from dflash.execution.versions import behaviour_of

MAX_PASSES = 8
"""Torch runs a function once to warm it up, records it the second time and replays it the third;
one that waits for another's recording takes a pass more."""

_TURN = threading.RLock()
_TREES = "torch._inductor.cudagraph_trees"


class Trees:
    """Regions compiled with ``mode="reduce-overhead"``.

    ``warmed`` runs and captures every round beforehand, in the thread that the installed torch
    wants; otherwise the worker does on first use, as most programs do.
    """

    def __init__(self, program: Program, *, warmed: bool, unsafe: bool) -> None:
        self._program = program
        self._warmed = warmed
        self._unsafe = unsafe
        self._behaviour = behaviour_of(torch.__version__)
        self._parts = dict(program.parts)
        self._first = {parts[0] for parts in program.rounds}
        for region in program.regions():
            for tensor in region.constants:
                _keep_address(tensor)
        for tensor in program.inputs.values():
            _keep_address(tensor)
        self._undo = compile_regions(program, all_of_them=True, cudagraphs=True)
        self._launched: Tensor | None = None

    def warm_up(self) -> WarmUp:
        """Capture everything here, where that is the thread for it.

        Raises:
            CaptureError: a capture failed, or there is no end to them.
            NumericsError: a replay gives other numbers.
        """
        if self._warmed and self._behaviour.captures_in == "main":
            return self._until_quiet()
        first_compile()
        return WarmUp()

    def enter_worker(self) -> WarmUp:
        """Capture here what must be captured here; compare a replay with launching."""
        if not self._warmed:
            if not self._unsafe:
                self._refuse_sure_death()
            return WarmUp()
        if self._launched is None:
            found = self._until_quiet()
            return found.with_(worker_difference=found.difference)
        probe = rehearse(self._program, self.run).probe
        return WarmUp(worker_difference=self._check(probe, "its worker's thread"))

    def run(self, part: str) -> None:
        """Run one part; the first of a round marks the step."""
        with _TURN:
            if part in self._first:
                torch.compiler.cudagraph_mark_step_begin()
            self._parts[part]()

    def close(self) -> None:
        """Put the functions back; the graphs go with the compiled ones."""
        self._undo()

    def _until_quiet(self) -> WarmUp:
        watch, graphs = capture_watch(), capture_watch().total
        skipped, there = num_skipped(), _has_manager(self._program.device)
        launched = self._pass()
        for _ in range(MAX_PASSES):
            before = watch.total
            seen = self._pass()
            if watch.total == before:
                break
        else:
            raise CaptureError(
                f'mode "warmed" still captured on {self._program.device} in pass {MAX_PASSES + 1}'
                " over the same rounds: their graphs do not settle",
                hint='set execution.mode = "graphed" or "compiled"',
            )
        graphs += _has_manager(self._program.device) and not there  # it begins with an empty graph
        if watch.total == graphs and list(self._program.regions()):
            raise self._nothing_captured(num_skipped() - skipped)
        self._launched = launched.probe
        return WarmUp(
            num_graphs=watch.total - graphs,
            launched_s=None,  # the first pass compiles
            replayed_s=seen.seconds,
            difference=self._check(seen.probe, threading.current_thread().name),
        )

    def _pass(self) -> Rehearsed:
        try:
            return rehearse(self._program, self.run)
        except AssertionError as error:
            if str(error):
                raise
            raise self._death() from error

    def _check(self, probe: Tensor, thread: str) -> float:
        assert self._launched is not None
        what = f'mode "warmed" on {self._program.device}, replayed by {thread},'
        return check_same(self._launched, probe, limit=TOLERANCE, what=what)

    def _refuse_sure_death(self) -> None:
        module = sys.modules.get(_TREES)
        if self._behaviour.trees_belong_to != "importer" or module is None:
            return
        if not hasattr(module.local, "tree_manager_containers"):
            raise self._death()

    def _nothing_captured(self, num_skipped: int) -> CaptureError:
        # Where a graph is partitioned, parts that cannot be captured are cut out uncounted.
        how_many = f"{num_skipped} compiled graphs" if num_skipped else "all that was compiled"
        return CaptureError(
            f'mode "warmed" captured nothing on {self._program.device}: torch skipped {how_many}'
            " (tensors on the CPU or on several devices, inputs that are changed, operations that"
            " no graph can hold)",
            hint="TORCH_LOGS=cudagraphs says why, graph by graph; execution.mode = 'graphed' fails"
            " at the very operation",
        )

    def _death(self) -> CaptureError:
        return CaptureError(
            f"thread {threading.current_thread().name} cannot capture on torch"
            f" {torch.__version__}: its cudagraph trees belong to the thread that imported them"
            " first, and get_obj in torch/_inductor/cudagraph_trees.py fails a bare assertion in"
            " every other (pytorch#123177)",
            hint='set execution.mode = "graphed" or "warmed"',
        )


def _has_manager(device: torch.device) -> bool:
    """Whether this thread has captured, or tried to, by torch's trees on *device* before."""
    module = sys.modules.get(_TREES)
    if module is None or device.type != "cuda":
        return False
    try:
        return module.get_manager(device.index or 0, create_if_none_exists=False) is not None
    except AssertionError:  # this thread has no trees
        return False


def _keep_address(tensor: Tensor) -> None:
    """Tell torch that *tensor* stays where it is, so that no replay copies it first."""
    torch._dynamo.mark_static_address(tensor, guard=False)  # noqa: SLF001 - it has no other name
