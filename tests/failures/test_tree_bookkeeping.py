"""What cross-thread-replay says of torch's trees: how two backward passes in one manager end.

The manager and its nodes are torch's; their captures are plain calls, since there may be no GPU.
"""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor import cudagraph_trees as trees
from torch.utils._ordered_set import OrderedSet

from dflash.failures.cross_thread_replay import SYMPTOMS

Tensors = list[torch.Tensor]
FIELDS: dict[str, Callable[[], Any]] = {
    "roots": lambda: defaultdict(list),
    "warmed_up_functions": OrderedSet,
    "warned_functions": OrderedSet,
    "warned_mutation": OrderedSet,
    "graph_counter": itertools.count,
    "func_counter": itertools.count,
    "warmup_node_counter": lambda: itertools.count(-1, -1),
    "non_cudagraph_managed_mutation_hint": lambda: defaultdict(dict),
    "num_rerecord": lambda: defaultdict(lambda: defaultdict(int)),
    "path_state": lambda: trees.ExecutionState.NONE,
    "device_index": lambda: 0,
    "current_gen": lambda: -1,
    "debug_fail_counter": lambda: 0,
    "cuda_graphs_thread_pool": lambda: (0, 1),
    "stream": lambda: None,
    "current_node": lambda: None,
    "graph": lambda: SimpleNamespace(replay=lambda: None),
    "disable_invalidate_aliases": lambda: True,
    "has_live_user_visible_output_cloning": lambda: False,
    "running_forwards_with_pending_backwards": lambda: False,
    "ids_to_funcs": dict,
    "ids_to_stack_traces": dict,
    "id_to_mode": dict,
    "id_to_compile_id": dict,
}
C = torch._C  # noqa: SLF001


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A manager of torch's whose nodes capture nothing and give new gradients at every replay."""

    def record(node: Any, model: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:  # noqa: ANN401
        outputs = model(inputs)
        inputs.clear()
        node._add_first_outputs(outputs, {})  # noqa: SLF001
        return outputs

    def replay(node: Any, inputs: Tensors) -> Tensors:  # noqa: ANN401
        output = torch.ones(4)
        weak = output.untyped_storage()._weak_ref()  # noqa: SLF001
        node.outputs_weakrefs[0].swap_weakref(weak)
        inputs.clear()
        return [output]

    def check(condition: object, message: Callable[[], str]) -> None:
        if not condition and "Non cuda output" not in message():
            raise RuntimeError(message())

    def same_addresses(tensors: Tensors, addresses: list[int], places: list[int]) -> bool:
        return all(tensors[place].data_ptr() == addresses[place] for place in places)

    node = trees.CUDAGraphNode
    monkeypatch.setattr(node, "_record", record)
    monkeypatch.setattr(node, "run", replay)
    monkeypatch.setattr(node, "_allocate_and_copy_recording_inputs", lambda _, given: list(given))
    monkeypatch.setattr(node, "_reconstruct_from_tensor_metadata", lambda *_: None)
    holder = SimpleNamespace(add_strong_reference=lambda _: None)
    monkeypatch.setattr(trees, "get_container", lambda _: holder)
    monkeypatch.setattr(torch, "_check", check)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FIELDS["graph"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(C, "_cuda_getCheckpointState", lambda *_: None, raising=False)
    equal = "_tensors_data_ptrs_at_indices_equal"  # a build without CUDA has none
    monkeypatch.setattr(C, equal, same_addresses, raising=False)
    monkeypatch.setattr(trees.MarkStepBox, "mark_step_counter", 0)
    made = object.__new__(trees.CUDAGraphTreeManager)
    for name, value in FIELDS.items():
        setattr(made, name, value())
    for name in ("apply_checkpoint_execution_state_in_allocator", "dealloc_current_path_weakrefs"):
        monkeypatch.setattr(made, name, lambda: None, raising=False)
    checks = ("triton.slow_path_cudagraph_asserts", "triton.fast_path_cudagraph_asserts")
    with config.patch({**dict.fromkeys(checks, False), "triton.skip_cudagraph_warmup": True}):
        yield made


def backward_in(manager: Any, model: Callable[[Tensors], Tensors], x: torch.Tensor) -> Any:  # noqa: ANN401
    """Add a backward graph, captured at once for *x*; return how to run it and its gradients."""
    facts = {
        "model": model,
        "inputs": [x],
        "static_input_idxs": [0],
        "stack_traces": [None],
        "mode": trees.CompilationMode.BACKWARD,
        "kernel_free_cudagraph": False,
        "compile_id": None,
    }
    names = list(inspect.signature(manager.add_function).parameters)
    return manager.add_function(**{name: facts.get(name, ()) for name in names})


@pytest.mark.parametrize("dropped", ["while B's is recorded", "never"])
def test_a_neighbour_that_drops_its_gradients_once_is_expected_to_do_so_for_ever(
    dropped: str,
    manager: Any,  # noqa: ANN401
) -> None:
    held: dict[str, Tensors] = {}
    a, b = torch.ones(4), torch.ones(4)
    recorded: list[str] = []

    def model(inputs: Tensors) -> Tensors:
        recorded.append("root" if manager.current_node is None else "child")
        if recorded == ["root", "child"] and dropped != "never":
            held.clear()  # worker A, in a thread of its own, has cloned its gradients
        return [inputs[0] * 2]

    torch.compiler.cudagraph_mark_step_begin()  # A's, then B's, before either backward
    backward, held["A"] = backward_in(manager, model, a)
    held["B"] = backward([b])
    assert recorded == ["root", "child"]

    held.clear()
    torch.compiler.cudagraph_mark_step_begin()
    held["A"] = backward([a])  # replayed
    if dropped == "never":
        held["B"] = backward([b])
    else:
        with pytest.raises(RuntimeError, match="did not occur during replay") as told:
            backward([b])
        assert any(symptom in str(told.value) for symptom in SYMPTOMS)
    assert recorded == ["root", "child"]
