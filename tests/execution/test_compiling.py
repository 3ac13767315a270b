"""Regions are compiled as they ask for, with a limit of versions that holds in every thread."""

import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.execution import Region
from dflash.execution.compiling import MAX_VERSIONS, SAME_EVERY_TIME, compile_regions

DEFAULT_LIMIT = 8


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def doubling(backend: Callable[..., Any]) -> Any:  # noqa: ANN401 - what compile_regions needs
    program = SimpleNamespace(device=torch.device("cpu"), double=lambda x: x * 2)
    program.regions = lambda: [Region(program, "double", backend=backend)]
    return program


def counting(calls: list[int]) -> Callable[..., Any]:
    """A backend whose code notes the lengths it was called with."""

    def backend(graph: torch.fx.GraphModule, _examples: list[Tensor]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:  # noqa: ANN401
            calls.append(len(x))
            return graph(x)

        return call

    return backend


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="before torch 2.12 the limit is a setting of the process, which is the user's",
)
def test_a_worker_compiles_more_versions_than_torch_would_by_default() -> None:
    calls: list[int] = []
    program = doubling(counting(calls))
    compile_regions(program, all_of_them=True)
    lengths = list(range(2, 2 + DEFAULT_LIMIT + 4))
    assert len(lengths) < MAX_VERSIONS

    def work() -> None:
        for length in lengths:
            program.double(torch.ones(length))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert calls == lengths


def test_a_region_is_compiled_by_its_own_backend_until_it_is_put_back() -> None:
    calls: list[int] = []
    program = doubling(counting(calls))
    undo = compile_regions(program, all_of_them=True)
    assert program.double(torch.ones(3)).tolist() == [2.0] * 3
    undo()
    program.double(torch.ones(4))
    assert calls == [3]


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_inductor_compiles_with_graphs_where_asked_and_never_times_a_reduction_twice(
    monkeypatch: pytest.MonkeyPatch, *, cudagraphs: bool
) -> None:
    """What Inductor itself finds in its configuration; a product takes no C++ compiler."""
    from torch._inductor import compile_fx, config

    found: list[tuple[bool, bool]] = []
    original = compile_fx.compile_fx

    def spy(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found.append((config.dynamic_scale_rblock, config.triton.cudagraphs))
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    program = SimpleNamespace(device=torch.device("cpu"), square=lambda x: x @ x, inputs={})
    program.regions = lambda: [Region(program, "square")]
    compile_regions(program, all_of_them=True, cudagraphs=cudagraphs)
    assert program.square(torch.full((2, 2), 3.0)).tolist() == [[18.0, 18.0], [18.0, 18.0]]
    assert found[-1] == (False, cudagraphs)  # it calls itself with its options in force
    assert config.dynamic_scale_rblock, "only for what is compiled here"


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_no_kernel_is_chosen_by_what_was_faster_just_then(
    monkeypatch: pytest.MonkeyPatch, *, cudagraphs: bool
) -> None:
    """A tile size chosen by time changes how a sum is rounded, from one process to the next."""
    program = SimpleNamespace(device=torch.device("cpu"), double=lambda x: x * 2, inputs={})
    program.regions = lambda: [Region(program, "double")]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **asks: asked.append(asks) or function)
    compile_regions(program, all_of_them=True, cudagraphs=cudagraphs)
    options = asked[0]["options"]
    assert (options["deterministic"], options["dynamic_scale_rblock"]) == (True, False)
    assert options.get("triton.cudagraphs", False) is cudagraphs


def test_options_that_the_installed_torch_does_not_know_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would refuse all of them; "deterministic" came after 2.9, the oldest that we take."""
    monkeypatch.setitem(SAME_EVERY_TIME, "of_a_later_torch", True)
    program = SimpleNamespace(device=torch.device("cpu"), double=lambda x: x * 2)
    program.regions = lambda: [Region(program, "double")]
    compile_regions(program, all_of_them=True)
    assert program.double(torch.ones(3)).tolist() == [2.0] * 3


def squaring(**inputs: Tensor) -> Any:  # noqa: ANN401 - what compile_regions needs
    program = SimpleNamespace(device=torch.device("cpu"), square=lambda x: x @ x, inputs=inputs)
    program.regions = lambda: [Region(program, "square")]
    return program


def test_a_cached_graph_is_for_programs_with_the_same_static_inputs() -> None:
    """Up to torch 2.12 its key leaves them out, and graphs were captured anew for every batch."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def hits(program: Any, x: Tensor) -> int:  # noqa: ANN401
        torch.compiler.reset()
        counters["aot_autograd"].clear()
        for tensor in program.inputs.values():
            torch._dynamo.mark_static_address(tensor, guard=False)  # noqa: SLF001
        compile_regions(program, all_of_them=True, cudagraphs=True)
        assert program.square(x).tolist() == [[18.0, 18.0], [18.0, 18.0]]
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    static, another = (torch.full((2, 2), 3.0) for _ in range(2))
    with fresh_cache():
        assert hits(squaring(x=static), static) == 0
        assert hits(squaring(), another) == 0
        assert hits(squaring(x=static), static) == 1  # it is there


def test_the_key_of_a_captured_graph_names_its_static_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **asks: asked.append(asks) or function)
    x, y = torch.ones(2), torch.ones(2)
    for program in (squaring(x=x), squaring(), squaring(y=y, x=x), squaring(x=y)):
        compile_regions(program, all_of_them=True, cudagraphs=True)
    one, none, two, again = (str(asks["options"]["aot_inductor.metadata"]) for asks in asked)
    assert len({one, none, two}) == 3
    assert again == one
    compile_regions(squaring(x=x), all_of_them=True)
    assert "aot_inductor.metadata" not in asked[-1]["options"]
