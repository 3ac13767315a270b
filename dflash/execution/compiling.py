"""Compiling the regions of a program in place, and putting them back."""

import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dflash.execution.program import Program, Region

Undo = Callable[[], None]

MAX_VERSIONS = 64
"""Of one region; beyond, torch runs it eagerly with no more than a log line. Its own default, 8, is
fewer than the signatures that a program may be made ready for."""

SAME_EVERY_TIME = {"dynamic_scale_rblock": False, "deterministic": True}
"""Inductor's options, as far as the installed torch has them. By default each process times tile
sizes of some reductions and keeps what was faster just then: a second one (pytorch#189121, so that
of five compilations of one step on an H200 two or three gave a gradient norm that was 8e-6 off from
the others'), and several of reductions that it has no hint for
(``filter_reduction_configs_for_determinism`` in torch/_inductor/runtime/triton_heuristics.py). A
step of Qwen3-8B's drafter at 3072 tokens takes as long on an H200 with them as without."""

STATIC_INPUTS = "aot_inductor.metadata"
"""Inductor's option that means nothing here and is part of the key of its caches. Up to torch 2.12
the key leaves out which inputs are static (``_reduce_aot_config`` in
torch/_functorch/_aot_autograd/autograd_cache.py), so that a program whose batches are new tensors
was given what one with static buffers had compiled: on an H200 every batch of that length was
captured anew, and 1.9 GiB more were held after each turn of a bench, until there were none left."""


def compile_regions(program: Program, *, all_of_them: bool, cudagraphs: bool = False) -> Undo:
    """Replace regions by their compiled form; what is returned puts the functions back.

    Args:
        program: its ``kernel`` regions are compiled on a CUDA device in any case, without graphs.
        all_of_them: also compile the other regions.
        cudagraphs: let torch capture those others (``mode="reduce-overhead"``).
    """
    on_cuda = program.device.type == "cuda"
    originals: list[tuple[Region, Any]] = []
    for region in program.regions():
        if not (all_of_them or (region.kernel and on_cuda)):
            continue
        function = getattr(region.owner, region.name)
        originals.append((region, function))
        static = program.inputs if cudagraphs and not region.kernel else None
        options = _options(region, static=static)
        compiled = torch.compile(
            own_code(function), dynamic=region.dynamic, backend=region.backend, **options
        )
        setattr(region.owner, region.name, compiled)

    def undo() -> None:
        for region, function in originals:
            setattr(region.owner, region.name, function)

    return undo


def _options(region: Region, *, static: Iterable[str] | None) -> dict[str, Any]:
    """How torch is to compile *region*, and capture it where there are names of *static* inputs.

    A backend of somebody else's takes a mode, no options.
    """
    found = _versions_option()
    if region.backend != "inductor":
        return found | ({} if static is None else {"mode": "reduce-overhead"})
    options: dict[str, Any] = dict(SAME_EVERY_TIME)
    if static is not None:
        options |= torch._inductor.list_mode_options("reduce-overhead")  # noqa: SLF001
        options[STATIC_INPUTS] = {"static inputs": ", ".join(sorted(static))}
    known = torch._inductor.list_options()  # noqa: SLF001
    return found | {"options": {name: value for name, value in options.items() if name in known}}


def _versions_option() -> dict[str, Any]:
    """The limit of versions as an option that travels with the compiled function.

    From torch 2.12 on ``torch._dynamo.config`` is each thread's own, so that a limit set there by
    the main thread is unknown to a worker. Before, it is the process's and the only place.
    """
    takes_it = "recompile_limit" in inspect.signature(torch.compile).parameters
    return {"recompile_limit": MAX_VERSIONS} if takes_it else {}


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* on a code object that nobody shares.

    Compiled code hangs on the code object, so replicas would share one list of guarded versions,
    its limit of 8 (beyond which calls silently run eagerly) and, from thread to thread, its order.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def first_compile() -> None:
    """Compile something small, in this thread: the first compilation of a process must be alone.

    Threads that import the compiler together crash it or leave it broken (pytorch#136833, #123177).
    """
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def num_compiled() -> int:
    """Graphs that this process has compiled so far."""
    return _counted("stats", "unique_graphs")


def num_cached() -> int:
    """Graphs of ``num_compiled`` that torch's compile cache held, with their backward passes."""
    return _counted("aot_autograd", "autograd_cache_hit")


def num_skipped() -> int:
    """Compiled graphs that this process was asked to capture and, without a word, did not."""
    return _counted("inductor", "cudagraph_skips")


def _counted(group: str, name: str) -> int:
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters[group][name])
