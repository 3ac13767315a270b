"""``graphed``: every part of every round is one CUDA graph; a step runs no Python at all.

Gradients live between two graphs of a round in the runner's pool, as the tensors that autograd
made when the first one was captured. So ``update`` is captured once for each round, reading the
gradients of that round's own graph: a second update graph costs kilobytes, while letting two graphs
write to the same gradients costs a pass over them (a copy), or three (zero, then add), in every
step of one of the two. Rounds never overlap, so the second round is captured into the memory of the
first, its gradients' too.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.execution.compiling import compile_regions
from dflash.execution.graphs import capture
from dflash.execution.peaks import Replayed
from dflash.execution.program import Program
from dflash.execution.report import WarmUp
from dflash.execution.rounds import TOLERANCE, check_same, rehearse

TIMED = 4
"""Times that all rounds are launched, and replayed, to compare the two by the fastest: whatever
else the machine does can only make one slower. One of each was not enough: beside other processes
on the same H200 a replay once took 1.35 times as long as launching."""

LONG_S = 2.0
"""Once replays have taken this long, two of them are enough."""


@dataclass(slots=True)
class _Node:
    """One part in its place in a round: the graph, what it leaves, and what may follow."""

    part: str
    graph: torch.cuda.CUDAGraph | None = None
    carried: list[Tensor | None] = field(default_factory=list)
    next: dict[str, "_Node"] = field(default_factory=dict)


class Graphed:
    """Compiled parts, captured with the thread-local error mode into one pool, and replayed."""

    def __init__(self, program: Program, stream: torch.cuda.Stream) -> None:
        self._program = program
        self._stream = stream
        self._parts = dict(program.parts)
        self._undo = compile_regions(program, all_of_them=True)
        self._root = _Node("")
        self._here = self._root
        self._expected = torch.zeros(0)
        self._limit = 0.0
        self._replayed = Replayed(program.device)

    def warm_up(self) -> WarmUp:
        """Launch the rounds until they are warm, capture them, and compare a replay.

        Raises:
            CaptureError: a part cannot be captured.
            NumericsError: a replay gives other numbers.
        """
        rehearse(self._program, self._launch)
        launched = [rehearse(self._program, self._launch) for _ in range(TIMED)]
        # Kernels that repeat themselves bit for bit must do so in a graph too.
        self._expected = launched[-1].probe
        alike = all(torch.equal(one.probe, self._expected) for one in launched)
        self._limit = 0.0 if alike else TOLERANCE
        self._capture()
        rehearse(self._program, self.run)  # the first replay uploads the graphs
        replayed = [rehearse(self._program, self.run) for _ in range(2)]
        while len(replayed) < TIMED and sum(one.seconds for one in replayed) < LONG_S:
            replayed.append(rehearse(self._program, self.run))
        return WarmUp(
            num_graphs=sum(1 for _ in _nodes(self._root)),
            launched_s=min(one.seconds for one in launched),
            replayed_s=min(one.seconds for one in replayed),
            difference=max(self._check(one.probe, "the main thread") for one in replayed),
        )

    def enter_worker(self) -> WarmUp:
        """Replay every round once in this thread, and compare that with launching them."""
        probe = rehearse(self._program, self.run).probe
        return WarmUp(worker_difference=self._check(probe, "its worker's thread"))

    def run(self, part: str) -> None:
        """Replay *part* as it comes next in its round; one may follow itself."""
        here = self._here
        node = here.next.get(part) or (here if part == here.part else self._root.next.get(part))
        assert node is not None, f"{part} does not follow {here.part or 'the start'} in any round"
        assert node.graph is not None, "not warmed up"
        node.graph.replay()
        self._program.carry(node.carried)
        self._here = node if node.next else self._root

    def close(self) -> None:
        """Drop every graph, which frees the pool, and put the functions back."""
        for node in _nodes(self._root):
            node.carried = []
            if node.graph is not None:
                node.graph.reset()
                node.graph = None
        self._root = self._here = _Node("")
        self._replayed.freed()
        self._undo()

    def _launch(self, part: str) -> None:
        self._parts[part]()

    def _capture(self) -> None:
        torch.cuda.empty_cache()  # what launching has left in the cache, the graphs need themselves
        pool = torch.cuda.graph_pool_handle()
        with self._program.rehearsal(), self._replayed.captured():
            for parts in self._program.rounds:
                node = self._root
                for part in parts:
                    node = node.next.setdefault(part, _Node(part))
                    node.graph = capture(
                        self._parts[part],
                        device=self._program.device,
                        stream=self._stream,
                        pool=pool,
                        what=f'part "{part}" of mode "graphed"',
                    )
                    node.carried = [_alias(tensor) for tensor in self._program.carried()]
        self._replayed.counted()
        self._here = self._root

    def _check(self, probe: Tensor, thread: str) -> float:
        what = f'mode "graphed" on {self._program.device}, replayed by {thread},'
        return check_same(self._expected, probe, limit=self._limit, what=what)


def _nodes(root: _Node) -> list[_Node]:
    found = []
    for node in root.next.values():
        found += [node, *_nodes(node)]
    return found


class _Memory:
    """Device memory by address, as ``torch.as_tensor`` takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor on the same memory that keeps nothing alive.

    The allocator may give that memory to the next capture, and after a replay of this one's graph
    the alias holds what the graph left.
    """
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "a gradient is laid out like its parameter"
    memory = _Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.view(tensor.shape)
