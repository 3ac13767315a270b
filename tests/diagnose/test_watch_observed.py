"""What was counted in a process is evidence only where it comes again and again after warm-up."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from watched_programs import slugs, watched, written

from dflash.diagnose.findings import WatchDiagnosis
from dflash.diagnose.observed import read_observed
from dflash.diagnose.verdicts import diagnose_watched
from dflash.diagnose.watch import Watched

GIB = 1 << 30
BEGUN_S = 500.0


def diagnosis_of(folder: Path, counts: Sequence[tuple[float, dict[str, Any]]]) -> WatchDiagnosis:
    """Of a process that had counted so much at so many seconds, as an observer writes it."""
    lines: list[dict[str, Any]] = [
        {"kind": "process", "s": BEGUN_S, "pid": 7, "argv": ["python"], "python": "3.12"},
        {"kind": "torch", "s": BEGUN_S + 1, "version": "2.13"},
    ]
    for at_s, counted in counts:
        nothing = {"compiled": 0, "recompiled": 0, "skipped": 0, "captures": {}, "memory": {}}
        lines.append({"kind": "counts", "s": BEGUN_S + at_s, **nothing, **counted})
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "torn'
    (folder / "7.jsonl").write_text(text)
    return diagnose_watched(Watched(["x"], processes=read_observed(folder, begun_s=BEGUN_S)))


WARM = [(5.0, {"compiled": 3}), (9.0, {"compiled": 6, "recompiled": 1})]


def later(*times: float, captures: bool = False) -> list[tuple[float, dict[str, Any]]]:
    """One more version, or capture, at each of *times*."""
    found = []
    for number, at_s in enumerate(times, start=1):
        more = {"captures": {"w (1)": number}} if captures else {"recompiled": 1 + number}
        found.append((at_s, {"compiled": 6 + number, "recompiled": 1, **more}))
    return found


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((), []),
        ((600, 1200), []),  # an evaluation, and one more
        ((600, 601, 602, 603), []),  # one evaluation with several graphs
        ((20, 40, 60, 80, 100), []),  # warm-up goes on
        ((600, 1200, 1800), ["late-shape"]),
    ],
)
@pytest.mark.parametrize("captures", [False, True])
def test_late_shapes_are_those_that_come_again_and_again(
    times: tuple[float, ...], expected: list[str], *, captures: bool, tmp_path: Path
) -> None:
    found = diagnosis_of(tmp_path, [*WARM, *later(*times, captures=captures)])
    assert slugs(found) == expected
    if expected:
        made = "0 compilations, 1 captures" if captures else "1 compilations, 0 captures"
        assert found.suffered[0].evidence[0] == f"after 600 s: {made}"


def test_graphs_of_new_functions_are_no_late_shapes(tmp_path: Path) -> None:
    new = [(at_s, {"compiled": 6 + number}) for number, at_s in enumerate((600.0, 1200.0, 1800.0))]
    assert slugs(diagnosis_of(tmp_path, [*WARM, *new])) == []


def test_counts_that_torch_has_reset_are_no_news(tmp_path: Path) -> None:
    reset = [(600.0, {"compiled": 0}), (1200.0, {"compiled": 9, "recompiled": 0})]
    found = diagnosis_of(tmp_path, [*WARM, *reset])
    assert slugs(found) == []
    assert found.processes[0].compiled_graphs == 9


def memory(at_s: float, reserved: float, allocated: float, *, allocs: int) -> Any:  # noqa: ANN401
    counted = {"reserved": int(reserved * GIB), "allocated": int(allocated * GIB)}
    return at_s, {"memory": {"cuda:0": {**counted, "device_allocs": allocs}}}


@pytest.mark.parametrize(
    ("bytes_gib", "expected"),
    [
        (((10, 20, 30, 40), (9, 9, 9, 9)), ["allocator-churn"]),
        (((10, 20, 30, 40), (9, 19, 28, 38)), []),  # in use
        (((10, 20, 30, 40), (9, 38, 9, 9)), []),  # was in use, until somebody reset the peak
        (((40, 40, 40, 40), (9, 9, 9, 9)), []),  # from the start, for graphs' pools
        (((40, 20, 30, 41), (9, 9, 9, 9)), []),  # given back and taken again
        (((0.1, 0.2, 0.3, 0.4), (0.01, 0.01, 0.01, 0.01)), []),  # nobody minds
    ],
)
def test_churn_is_memory_that_grows_and_was_never_in_use(
    bytes_gib: tuple[Sequence[float], Sequence[float]], expected: list[str], tmp_path: Path
) -> None:
    pairs = zip(*bytes_gib, strict=True)
    counts = [
        memory(5.0 + 300 * number, *pair, allocs=40 + number) for number, pair in enumerate(pairs)
    ]
    found = diagnosis_of(tmp_path, counts)
    assert slugs(found) == expected
    if expected:
        line = "after 605 s: 30.0 GiB reserved for 9.0 GiB on cuda:0, 1 more device allocations"
        assert line in found.suffered[0].evidence


def test_graphs_that_torch_skipped_are_counted(tmp_path: Path) -> None:
    found = diagnosis_of(tmp_path, [(5.0, {"compiled": 3, "skipped": 2})])
    assert slugs(found) == ["skipped-graphs"]
    assert found.suffered[0].evidence[0].startswith("2 graphs that torch was asked to capture")


COUNTED = """
import threading, time, torch
def capture():
    for _ in range(3):
        assert torch.cuda.CUDAGraph().capture_begin(pool="mine") == "mine"
thread = threading.Thread(target=capture, name="drafter-0")
thread.start(), thread.join()
torch.MEMORY.update({
    "num_alloc_retries": 0, "num_device_alloc": 4,
    "reserved_bytes.all.current": 8 << 30, "allocated_bytes.all.peak": 2 << 30,
})
"""


def test_captures_and_memory_are_counted_without_the_program_noticing(tmp_path: Path) -> None:
    seen = watched(written(tmp_path, COUNTED, small_torch=True))
    assert (seen.code, seen.stderr) == (0, "")
    (process,) = seen.processes
    ((thread, count),) = process.last.captures.items()
    assert (thread.partition(" (")[0], count) == ("drafter-0", 3)
    expected = {"reserved": 8 << 30, "allocated": 2 << 30, "device_allocs": 4}
    assert process.last.memory == {"cuda:0": expected}
