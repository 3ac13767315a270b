"""Torch's own graphs: captured in the right thread, until nothing new comes, marks in turn."""

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Counting
from torch import Tensor

from dflash.execution import CaptureError, NumericsError, Region, behaviour_of
from dflash.execution.captures import CaptureWatch
from dflash.execution.report import WarmUp
from dflash.execution.trees import MAX_PASSES, Trees

OLD, NEW = "2.11.0+cu130", "2.13.0+cu130"
TREES = "torch._inductor.cudagraph_trees"


class Recording(Counting):
    """Captures in passes 2 to ``settles``, as cudagraph trees do; ``wrong`` is added from then."""

    def __init__(self, watch: CaptureWatch, *, settles: int = 2) -> None:
        super().__init__()
        self.watch = watch
        self.settles = settles
        self.wrong = 0.0
        self.passes = 0
        self.kept: list[Tensor] = []

    def regions(self) -> list[Region]:
        return [Region(self, "double", constants=(self.result,))]

    def _part(self, name: str) -> None:
        super()._part(name)
        self.passes += name == "normal"
        if name == "normal" and 1 < self.passes <= self.settles:
            self.watch.begin()
        if self.passes > self.settles:
            self.result = self.result + self.wrong


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> CaptureWatch:
    found = CaptureWatch()
    monkeypatch.setattr("dflash.execution.trees.capture_watch", lambda: found)
    monkeypatch.setattr("dflash.execution.trees.compile_regions", lambda *_, **__: lambda: None)
    monkeypatch.setattr("dflash.execution.trees._keep_address", lambda _: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    return found


def on(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on another torch."""
    monkeypatch.setattr("dflash.execution.trees.behaviour_of", lambda _: behaviour_of(version))


def in_thread(body: Callable[[], Any], name: str = "drafter-0") -> Any:  # noqa: ANN401
    found: list[Any] = []

    def guarded() -> None:
        try:
            found.append(body())
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=guarded, name=name)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_up_to_2_12_the_main_thread_captures_and_the_worker_only_compares(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(OLD, monkeypatch)
    trees = Trees(Recording(watch), warmed=True, unsafe=False)
    report = trees.warm_up()
    main = threading.current_thread().name
    assert dict(watch.begun) == {main: 1}
    assert (report.num_graphs, report.difference) == (1, 0.0)
    assert in_thread(trees.enter_worker) == WarmUp(worker_difference=0.0)
    assert dict(watch.begun) == {main: 1}


def test_from_2_13_on_the_worker_captures_for_itself(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(NEW, monkeypatch)
    program = Recording(watch)
    trees = Trees(program, warmed=True, unsafe=False)
    trees.warm_up()
    assert program.calls == []
    found = in_thread(trees.enter_worker)
    assert (found.num_graphs, found.difference, found.worker_difference) == (1, 0.0, 0.0)
    assert dict(watch.begun) == {"drafter-0": 1}


@pytest.mark.parametrize("settles", [2, 3, 5])
def test_rounds_are_repeated_until_one_captures_nothing(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch, settles: int
) -> None:
    on(OLD, monkeypatch)
    program = Recording(watch, settles=settles)
    Trees(program, warmed=True, unsafe=False).warm_up()
    assert program.passes == settles + 1
    assert all(rehearsing for _, _, rehearsing in program.calls)


def test_captures_that_never_end_are_an_error(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(OLD, monkeypatch)
    program = Recording(watch, settles=99)
    with pytest.raises(CaptureError, match=f"still captured on cpu in pass {MAX_PASSES + 1}"):
        Trees(program, warmed=True, unsafe=False).warm_up()


def test_a_replay_that_computes_something_else_is_an_error(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(OLD, monkeypatch)
    program = Recording(watch)
    program.wrong = 0.01
    with pytest.raises(NumericsError, match=r'mode "warmed" on cpu.*differ by 0\.00'):
        Trees(program, warmed=True, unsafe=False).warm_up()


@pytest.mark.parametrize("skipped", [(2, "2 compiled graphs"), (0, "all that was compiled")])
def test_a_program_whose_graphs_torch_all_skips_is_an_error_and_says_so(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch, skipped: tuple[int, str]
) -> None:
    """A partitioned graph is skipped uncounted."""
    num_skipped, told = skipped
    on(OLD, monkeypatch)
    program = Recording(watch, settles=1)  # captures nothing
    monkeypatch.setattr(
        "dflash.execution.trees.num_skipped", lambda: num_skipped * (program.passes > 0)
    )
    with pytest.raises(CaptureError, match=f"nothing on cpu: torch skipped {told}") as caught:
        Trees(program, warmed=True, unsafe=False).warm_up()
    assert "TORCH_LOGS=cudagraphs" in caught.value.hint


def test_a_lazy_program_runs_nothing_beforehand(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(NEW, monkeypatch)
    program = Recording(watch)
    trees = Trees(program, warmed=False, unsafe=False)
    trees.warm_up()
    assert in_thread(trees.enter_worker) == WarmUp()
    assert program.calls == []


def test_a_lazy_worker_that_is_sure_to_die_is_told_why(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread has imported the trees first; a local of its own is all it takes."""
    local = threading.local()
    local.tree_manager_containers = {}
    monkeypatch.setitem(sys.modules, TREES, SimpleNamespace(local=local))
    on(OLD, monkeypatch)
    trees = Trees(Recording(watch), warmed=False, unsafe=False)
    trees.warm_up()
    with pytest.raises(CaptureError, match=r"thread drafter-0 cannot capture .*get_obj") as caught:
        in_thread(trees.enter_worker)
    assert "graphed" in caught.value.hint
    assert in_thread(Trees(Recording(watch), warmed=False, unsafe=True).enter_worker) == WarmUp()
    on(NEW, monkeypatch)
    assert in_thread(Trees(Recording(watch), warmed=False, unsafe=False).enter_worker) == WarmUp()


def test_a_bare_assertion_of_the_trees_becomes_a_sentence(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(OLD, monkeypatch)
    program = Recording(watch)

    def dies(_: Tensor) -> Tensor:
        raise AssertionError

    program.double = dies
    with pytest.raises(CaptureError, match="cudagraph trees belong to the thread that imported"):
        Trees(program, warmed=True, unsafe=False).warm_up()


def test_the_first_part_of_every_round_marks_the_step(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(OLD, monkeypatch)
    program = Recording(watch)
    marks: list[int] = []
    monkeypatch.setattr(
        torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(len(program.calls))
    )
    trees = Trees(program, warmed=True, unsafe=False)
    for part in ("normal", "update", "normal", "update"):
        trees.run(part)
    assert marks == [0, 2]


def test_parts_of_two_programs_take_turns(
    watch: CaptureWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark in one thread ends every thread's step, so it must not fall inside a part."""
    on(OLD, monkeypatch)
    inside: list[str] = []
    overlaps: list[str] = []

    class Slow(Recording):
        def _part(self, name: str) -> None:
            inside.append(name)
            threading.Event().wait(0.005)
            overlaps.extend(inside[1:])
            inside.pop()

    def work() -> None:
        trees = Trees(Slow(watch), warmed=True, unsafe=False)
        for _ in range(10):
            trees.run("normal")
            trees.run("update")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []


class FakeManager:
    """Stands where torch's manager captures: everything of the trees but CUDA is real."""

    def __init__(self, _device: int) -> None:
        pass

    def add_function(self, _model: object, *_: object, **__: object) -> tuple[Any, str]:
        return (lambda _inputs: "replayed"), "recorded"


def test_the_installed_torch_behaves_as_its_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a second thread may capture, and whether it replays what main has captured."""
    import torch._inductor.compile_fx as fx
    import torch._inductor.cudagraph_trees as ct

    behaviour = behaviour_of(torch.__version__)
    monkeypatch.setattr(ct, "CUDAGraphTreeManager", FakeManager)
    run = fx.cudagraphify(
        None,  # type: ignore[arg-type]
        (),
        device_index=0,
        stack_traces=[None],
        is_backward=False,
        is_inference=False,
    )
    assert run([128]) == "recorded"
    if behaviour.captures_in == "main":
        assert in_thread(lambda: run([128])) == "replayed"
        with pytest.raises(AssertionError) as caught:
            in_thread(lambda: run([512]))
        assert str(caught.value) == ""
    else:
        assert in_thread(lambda: run([128])) == "recorded", "for itself"
        assert in_thread(lambda: run([512])) == "recorded"
