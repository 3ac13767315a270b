"""``graphed``: each part in its place has a graph, and a replay is held against launching."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import Counting
from torch import Tensor

from dflash.execution import CaptureError, NumericsError, Runner
from dflash.execution.graphed import Graphed
from dflash.execution.rounds import Rehearsed

SEVERAL = (("normal", "normal_add", "update"), ("metric", "metric_add", "update"))


class Replays:
    """Stands for ``capture``: a graph that calls its part again, and a log of both."""

    def __init__(self) -> None:
        self.captured: list[str] = []
        self.replayed: list[str] = []
        self.wrong = 0.0
        self.fails_at = ""

    def __call__(self, body: Callable[[], None], *, what: str, **_: object) -> Any:  # noqa: ANN401
        part = re.findall(r'part "(\w+)"', what)[0]
        if part == self.fails_at:
            raise CaptureError(what)
        body()
        self.captured.append(part)
        mine = f"{part} {len(self.captured)}"
        replays = self

        class Graph:
            def replay(self) -> None:
                replays.replayed.append(mine)
                body()
                program = body.func.__self__  # type: ignore[attr-defined]  # a partial of a method
                program.result = program.result + replays.wrong

            def reset(self) -> None:
                replays.replayed.append(f"reset {mine}")

        return Graph()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    found = Replays()
    monkeypatch.setattr("dflash.execution.graphed.capture", found)
    monkeypatch.setattr("dflash.execution.graphed._alias", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr("dflash.execution.graphed.compile_regions", lambda *_, **__: lambda: None)
    return found


class Leaving(Counting):
    """Leaves a tensor that tells which part, in which order, was run last by Python."""

    def _part(self, name: str) -> None:
        super()._part(name)
        self.left = [torch.tensor(float(len(self.calls)))] if name != "update" else [None]


def graphed(program: Counting) -> Graphed:
    stream: Any = None
    return Graphed(program, stream)


def test_every_part_is_captured_once_in_every_place_it_has(replays: Replays) -> None:
    execution = graphed(Counting(SEVERAL))
    report = execution.warm_up()
    assert replays.captured == [part for parts in SEVERAL for part in parts]
    assert report.num_graphs == 6
    assert report.difference == 0.0


def test_an_update_replays_the_graph_of_its_own_round(replays: Replays) -> None:
    execution = graphed(Counting(SEVERAL))
    execution.warm_up()
    replays.replayed.clear()
    for part in ("metric", "metric_add", "update", "normal", "normal_add", "normal_add", "update"):
        execution.run(part)
    assert replays.replayed == [
        *("metric 4", "metric_add 5", "update 6"),
        *("normal 1", "normal_add 2", "normal_add 2", "update 3"),
    ]


def test_a_round_that_was_left_begins_anew(replays: Replays) -> None:
    execution = graphed(Counting(SEVERAL))
    execution.warm_up()
    replays.replayed.clear()
    for part in ("normal", "normal", "metric"):
        execution.run(part)
    assert replays.replayed == ["normal 1", "normal 1", "metric 4"]
    with pytest.raises(AssertionError, match="update does not follow metric in any round"):
        execution.run("update")


def test_after_a_replay_the_program_holds_what_that_graph_left(replays: Replays) -> None:
    del replays
    program = Leaving()
    execution = graphed(program)
    execution.warm_up()
    (at_capture,) = execution._root.next["normal"].carried  # noqa: SLF001
    execution.run("normal")
    (held,) = program.carried()
    assert held is at_capture, "not what Python left"
    execution.run("update")
    assert program.carried() == [None]


def test_a_replay_that_computes_something_else_is_an_error(replays: Replays) -> None:
    program = Counting()
    execution = graphed(program)
    replays.wrong = 1e-6
    with pytest.raises(NumericsError, match=r'mode "graphed" on cpu, replayed by the main') as no:
        execution.warm_up()
    assert "[2.0]" in no.value.what, "the number that launching gives"
    assert "allowed is none" in no.value.what
    assert no.value.exit_code == 1


def test_a_worker_whose_replay_differs_is_told_so(replays: Replays) -> None:
    execution = graphed(Counting())
    execution.warm_up()
    assert execution.enter_worker().worker_difference == 0.0
    replays.wrong = 0.5
    with pytest.raises(NumericsError, match="replayed by its worker's thread"):
        execution.enter_worker()


class Restless(Counting):
    """Two launched runs differ in the sixth digit, as with atomics."""

    def probe(self) -> Tensor:
        return torch.tensor([1.0 + 1e-6 * len(self.calls)], dtype=torch.float64)


def test_kernels_that_do_not_repeat_themselves_are_held_to_a_tolerance(replays: Replays) -> None:
    del replays
    execution = graphed(Restless())
    report = execution.warm_up()
    assert report.difference is not None
    assert 0 < report.difference < 1e-4
    assert (execution.enter_worker().worker_difference or 0) > 0


def test_closing_resets_every_graph(replays: Replays) -> None:
    execution = graphed(Counting())
    execution.warm_up()
    replays.replayed.clear()
    execution.close()
    assert replays.replayed == ["reset normal 1", "reset update 2"]


def test_a_capture_that_fails_ends_the_rehearsal_and_closes(replays: Replays) -> None:
    program = Counting()
    replays.fails_at = "update"
    execution = graphed(program)
    with pytest.raises(CaptureError):
        execution.warm_up()
    assert not program.rehearsing
    execution.close()
    assert replays.replayed == ["reset normal 1"]


@pytest.mark.parametrize("mode", ["graphed", "warmed", "reduce-overhead"])
def test_a_program_on_a_cpu_has_no_graphs(mode: Any) -> None:  # noqa: ANN401
    with pytest.raises(CaptureError, match=f'mode "{mode}" captures CUDA graphs, .* on cpu'):
        Runner(Counting(), mode)


@pytest.mark.parametrize(("seconds", "replayed"), [(0.02, 4), (0.8, 3), (1.0, 2), (30.0, 2)])
def test_long_rounds_are_replayed_twice_to_time_them(
    replays: Replays, monkeypatch: pytest.MonkeyPatch, seconds: float, *, replayed: int
) -> None:
    def rehearse(program: Counting, run: Callable[[str], None]) -> Rehearsed:
        for part in program.rounds[0]:
            run(part)
        return Rehearsed(torch.zeros(1), seconds)

    monkeypatch.setattr("dflash.execution.graphed.rehearse", rehearse)
    graphed(Counting()).warm_up()
    # once more beforehand, which uploads the graphs
    assert replays.replayed == ["normal 1", "update 2"] * (1 + replayed)
