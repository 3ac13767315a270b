"""What a row says of a process: also of one that failed, and by the devices that the case uses."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_cases import setting

from dflash.execution import capture_watch
from dflash.measurement import Memory, Verdict
from dflash_bench.cases import all_cases
from dflash_bench.child import Child
from dflash_bench.counters import Counters
from dflash_bench.rows import Beside, row_of
from dflash_bench.subjects import Failure

APART = setting("graphed", devices=("cuda:0", "cuda:1"), target_device="cuda:2")


def child(**facts: object) -> Child:
    """One that was never started, and that knows *facts*."""
    made = Child("made up", dict, limit_s=1.0)  # type: ignore[arg-type]
    made.facts |= facts
    made.close()
    return made


def test_a_mode_that_failed_keeps_what_it_could_still_tell() -> None:
    failed = child(memory=Memory(peak_allocated_gib=3.0), process_gib=5.0, build_s=2.0)
    failed.failure = Failure("OutOfMemoryError", "", "prepare")
    row = row_of(all_cases()["drafter-step"], APART, failed, beside=Beside())
    assert row.state == "failed"
    assert row.memory is not None
    assert (row.memory.peak_allocated_gib, row.memory.process_gib) == (3.0, 5.0)
    assert row.memory.planned_gib is not None
    assert row.start_up is not None
    assert (row.start_up.build_s, row.start_up.first_step_s) == (2.0, None)


@pytest.mark.parametrize(("watched", "told"), [(6.0, 6.0), (4.0, 5.0), (None, 5.0)])
def test_the_most_that_a_process_held_is_told(watched: float | None, told: float) -> None:
    beside = Beside(process_gib=watched)
    row = row_of(all_cases()["drafter-step"], APART, child(process_gib=5.0), beside=beside)
    assert row.memory is not None
    assert row.memory.process_gib == told


def test_what_is_counted_after_the_first_step_is_unknown_before_it() -> None:
    counters = Counters(torch.device("cpu"))
    before = counters.graphs()
    counters.begin()
    after = counters.graphs()
    assert (before.recompiles, before.captured_late) == (None, None)
    assert (after.recompiles, after.captured_late) == (0, 0)


COUNT = """
import torch
from dflash_bench.counters import Counters

counters = Counters(torch.device("cpu"))
counts = lambda: (counters.graphs().compiled, counters.graphs().cached)
print(*counts())
torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(8))
print(*counts())
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(8))
print(*counts())
"""


def test_what_the_compile_cache_held_is_counted(tmp_path: Path) -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", COUNT],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout.split("\n")[:3]
        for _ in range(2)
    ]
    assert found == [["0 0", "1 0", "2 0"], ["0 0", "1 1", "2 1"]]


def test_what_goes_on_while_steps_are_timed_is_told() -> None:
    counters = Counters(torch.device("cpu"))
    counters.begin()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert counters.found()["unsettled"] == ""  # no step is timed yet
    counters.read(8)
    assert counters.found()["unsettled"] == ""
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert counters.found()["unsettled"] == "while it was timed, graphs were still compiled (1)"
    capture_watch().begun["a thread"] += 70
    told = "while it was timed, graphs were still compiled (1) and captured (70)"
    counters.read(12)
    assert counters.found()["unsettled"] == told
    capture_watch().begun.pop("a thread")
    timed = child(unsettled=told)
    timed.turns = [[1.0, 1.0]]
    row = row_of(all_cases()["drafter-step"], APART, timed, beside=Beside())
    assert (row.state, row.why) == ("measured", told)


def test_every_case_says_where_its_steps_are_timed() -> None:
    found = {name: case.devices(APART) for name, case in all_cases().items()}
    assert found == {
        "drafter-step": ("cuda:0", "cuda:1"),
        "target-forward": ("cuda:2",),
        "pipeline": ("cuda:0", "cuda:1", "cuda:2"),
        "decode": ("cuda:2",),
        "mask": ("cuda:0",),
        "objective": ("cuda:0",),
        "packing": ("cpu",),
    }


@pytest.mark.parametrize(("case", "num_devices"), [("drafter-step", 2), ("target-forward", 1)])
def test_the_share_of_the_products_rate_is_of_as_many_devices(case: str, num_devices: int) -> None:
    timed = child()
    timed.turns.append([1.0, 1.0])
    row = row_of(all_cases()[case], APART, timed, beside=Beside(matrix_tflops=100.0))
    assert row.model_tflops is not None
    assert row.matrix_share == pytest.approx(row.model_tflops / num_devices / 100.0)


@pytest.mark.parametrize(
    ("verdict", "after"),
    [("faster", 600.0), ("unclear", None), ("same", None), ("slower", None), (None, None)],
)
def test_only_a_mode_that_was_found_faster_pays_back(
    verdict: Verdict | None, after: float | None
) -> None:
    slow, quick = child(first_steps_ms=[1.0]), child(first_steps_ms=[1.0])
    slow.turns.append([10.0, 10.0])
    quick.turns.append([5.0, 5.0])
    slow.prepared_s, quick.prepared_s = 1.0, 4.0  # 3 s more, won back by 5 ms a step
    beside = Beside(baseline=slow, verdict=verdict)
    row = row_of(all_cases()["mask"], setting("launched"), quick, beside=beside)
    assert row.start_up is not None
    assert row.start_up.pays_back_after_steps == after


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([], "interrupted before it was measured"),
        ([[1.0]], "it has 1 timed step, and a rate takes 2"),
    ],
)
def test_a_row_without_a_rate_says_what_it_lacks(turns: list[list[float]], why: str) -> None:
    timed = child()
    timed.turns += turns
    row = row_of(all_cases()["mask"], setting("launched"), timed, beside=Beside())
    assert (row.state, row.why) == ("skipped", why)


def test_a_row_whose_loss_is_no_number_says_so() -> None:
    for loss, why in ((math.nan, "its loss is nan"), (math.inf, "its loss is inf"), (2.0, "")):
        timed = child(loss=loss)
        timed.turns = [[1.0, 1.0]]
        row = row_of(all_cases()["drafter-step"], APART, timed, beside=Beside())
        assert (row.state, row.why) == ("measured", why)
    beside = Beside(note="measured alone")
    timed = child(loss=math.nan)
    timed.turns = [[1.0, 1.0]]
    row = row_of(all_cases()["drafter-step"], APART, timed, beside=beside)
    assert row.why == "measured alone; its loss is nan"
