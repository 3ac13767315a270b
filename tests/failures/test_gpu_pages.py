"""The pages that need a GPU: their logic under CUDA's rules without CUDA, and what detects them.

Whether a real GPU keeps these rules is what ``dflash diagnose`` finds out on one.
"""

from collections.abc import Callable

import fake_cuda
import pytest
import torch

from dflash.diagnose.expected import expectation
from dflash.diagnose.finished import FinishedRun
from dflash.failures import (
    allocator_churn,
    capture_race,
    compile_deadlock,
    cross_thread_replay,
    rng_in_capture,
)
from dflash.failures._traffic import MALLOC_BYTES
from dflash.records import StepRecord

GIB = dict.fromkeys(("cuda:0",), 10.0)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch, mallocs_from=MALLOC_BYTES)
    monkeypatch.setattr(capture_race, "NUM_CAPTURES", 4)


@pytest.mark.usefixtures("rules")
def test_a_capture_in_global_mode_ends_both_threads_and_ours_neither() -> None:
    assert capture_race.reproduce(faulty=True) == 2
    assert capture_race.reproduce(faulty=False) == 0
    assert capture_race.control() == 2


@pytest.mark.usefixtures("rules")
def test_the_generator_refuses_beside_a_capture_and_our_scores_do_not_ask_it() -> None:
    assert rng_in_capture.reproduce(faulty=True) == rng_in_capture.NUM_BATCHES
    assert rng_in_capture.reproduce(faulty=False) == 0


@pytest.mark.usefixtures("rules")
def test_an_error_that_is_none_of_cuda_s_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of the page's own")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    with pytest.raises(Exception, match="a bug of the page's own"):
        capture_race.reproduce(faulty=False)


def test_the_fixed_shape_is_no_shorter_than_any_batch_and_the_longest_does_not_come_first() -> None:
    lengths = allocator_churn.LENGTHS
    assert max(lengths) <= allocator_churn.TOKEN_BUDGET
    records = [n for n in range(len(lengths)) if lengths[n] == max(lengths[: n + 1])]
    assert records[-1] > allocator_churn.SETTLED, "what comes late must be longer than all before"


def run_of(reserved: Callable[[int], float], allocations: Callable[[int], int]) -> FinishedRun:
    steps = [
        StepRecord(
            step=10 * n, loss=1.0, lr=1e-3, grad_norm=1.0, allocated_gib=GIB,
            reserved_gib={"cuda:0": reserved(n)}, device_allocs={"cuda:0": allocations(n)},
        )
        for n in range(1, 7)
    ]  # fmt: skip
    return FinishedRun(records=tuple(steps))


def test_churn_is_seen_where_allocations_go_on_and_much_is_reserved() -> None:
    assert list(allocator_churn.MODE.detect(run_of(lambda _: 11.0, lambda _: 40))) == []  # type: ignore[misc]
    assert list(allocator_churn.MODE.detect(run_of(lambda _: 50.0, lambda _: 40))) == []  # type: ignore[misc]
    assert list(allocator_churn.MODE.detect(run_of(lambda _: 11.0, lambda n: 40 + n))) == []  # type: ignore[misc]
    found = list(allocator_churn.MODE.detect(run_of(lambda n: 10.0 * n, lambda n: 40 + n)))  # type: ignore[misc]
    assert found[0] == (
        "step 30: 30.0 GiB reserved for 10.0 GiB on cuda:0, 1 more device allocations"
    )


def test_a_deadlock_needs_both_sides() -> None:
    detect = compile_deadlock.MODE.detect
    assert detect is not None
    tracing = 'File "flex_attention.py", line 1 in create_fw_bw_graph'
    backward = 'File "compile_fx.py", line 2 in compile_fx_backward'
    assert list(detect(FinishedRun(text=tracing))) == []
    assert list(detect(FinishedRun(text=backward))) == []
    assert list(detect(FinishedRun(text=f"{backward}\n{tracing}"))) == [tracing, backward]


def test_the_deadlock_is_expected_of_the_versions_that_were_tried() -> None:
    said = {v: expectation(compile_deadlock.MODE, v).expected for v in ("2.11.0", "2.14.1")}
    assert set(said.values()) == {"reproduced"}
    assert expectation(compile_deadlock.MODE, "2.13.0").expected == "not known"


def worst_after(error: Exception) -> float:
    def gradients_of(_x: torch.Tensor) -> list[torch.Tensor]:
        raise error

    return cross_thread_replay.error_of(gradients_of, torch.ones(1), [torch.ones(1)])


@pytest.mark.parametrize(
    "said",
    [
        (
            "TODO: graph recording observed an input tensor deallocate during graph "
            " recording that did not occur during replay. Please file an issue."
        ),
        (
            "Error: accessing gradient tensor output of CUDAGraphs that has been overwritten by a"
            " subsequent run. Stack trace: ..."
        ),
        (
            "Detected 2 tensor(s) in the cudagraph pool not tracked as outputs. All live"
            " allocations must be tracked for correctness."
        ),
    ],
    ids=["deallocated", "overwritten", "not tracked"],
)
def test_what_the_trees_say_of_a_neighbours_gradients_is_the_failure(said: str) -> None:
    """Each as torch 2.14.1 said it on an H200."""
    assert worst_after(RuntimeError(said)) > cross_thread_replay.LIMIT


def test_no_other_error_is_taken_for_a_neighbours_gradients() -> None:
    with pytest.raises(RuntimeError, match="a bug of the page's own"):
        worst_after(RuntimeError("a bug of the page's own"))
