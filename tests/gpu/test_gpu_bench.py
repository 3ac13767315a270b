"""``dflash bench`` on a GPU: all five modes in one command, and the one that is known to die."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from dflash.execution import Mode, behaviour_of
from dflash.measurement import Bench, Row
from dflash_bench.drafters import PADDED
from dflash_bench.files import read_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MODES = get_args(Mode)
QUICK = ("--shape", "tiny", "--steps", "4", "--pairs", "4", "--max-time", "8")


def run_bench(out: Path, *words: str) -> tuple[int, Bench]:
    command = [sys.executable, "-m", "dflash.cli.__main__", "bench", *QUICK, *words]
    ended = subprocess.run([*command, "--json", str(out)], check=False, capture_output=True)
    assert out.exists(), ended.stderr.decode()[-4000:]
    return ended.returncode, read_bench(out)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    code, found = run_bench(out, "--lengths=fixed", "--lengths=variable", "--device=cuda:0")
    assert code == 0, [row.failed for row in found.rows if row.failed]
    return found


def rows_of(bench: Bench, lengths: str) -> dict[str, Row]:
    return {row.mode: row for row in bench.rows if row.lengths == lengths}


def test_all_five_modes_are_measured_with_fixed_and_with_varying_lengths(bench: Bench) -> None:
    for lengths in ("fixed", "variable"):
        rows = rows_of(bench, lengths)
        assert {mode: row.state for mode, row in rows.items()} == dict.fromkeys(MODES, "measured")
    assert {row.mode for row in bench.rows if row.padded} == set(PADDED)
    assert bench.matrix_tflops is not None
    assert bench.matrix_tflops > 1.0


def test_modes_agree_with_eager_on_the_loss(bench: Bench) -> None:
    for row in bench.rows:
        assert row.loss_against_eager is not None
        assert abs(row.loss_against_eager) < 5e-3, row.name


def test_captures_are_counted_and_timed_where_there_are_any(bench: Bench) -> None:
    rows = rows_of(bench, "fixed")
    for mode, row in rows.items():
        assert row.graphs is not None
        assert row.start_up is not None
        assert row.start_up.capture_s is not None
        captures = mode in ("reduce-overhead", "warmed", "graphed")
        assert bool(row.graphs.captured) == captures
        assert (row.start_up.capture_s > 0) == captures
    late = {mode: row.graphs.captured_late for mode, row in rows.items() if row.graphs}
    assert late["graphed"] == late["warmed"] == 0


def test_padding_keeps_everything_as_it_was_and_naive_feeding_does_not(bench: Bench) -> None:
    for mode, row in rows_of(bench, "variable").items():
        assert row.graphs is not None
        assert row.memory is not None
        if mode in PADDED:
            assert (row.graphs.recompiles, row.graphs.captured_late) == (0, 0)
            assert row.memory.device_allocs == 0
        else:
            assert row.graphs.recompiles


def test_memory_is_told_by_the_allocator_and_by_nvml(bench: Bench) -> None:
    for row in bench.rows:
        memory = row.memory
        assert memory is not None
        assert memory.peak_allocated_gib is not None
        assert memory.peak_reserved_gib is not None
        assert 0 < memory.peak_allocated_gib <= memory.peak_reserved_gib
        assert len(memory.steps) == len(memory.reserved_gib) > 1
        if memory.process_gib is not None:  # a container may hide it
            assert memory.process_gib >= memory.peak_reserved_gib * 0.99
    assert bench.weather is not None
    assert bench.weather.samples > 0


def test_reduce_overhead_with_three_drafters_is_a_failed_row_where_torch_kills_it(
    tmp_path: Path,
) -> None:
    modes = ("--mode=eager", "--mode=reduce-overhead", "--mode=graphed")
    code, found = run_bench(
        tmp_path / "bench.json", *modes, "--drafters=3", "--device=cuda:0", "--timeout=120"
    )
    rows = rows_of(found, "fixed")
    assert rows["eager"].state == rows["graphed"].state == "measured"
    if behaviour_of(torch.__version__).lazy_workers_die(3):
        failed = rows["reduce-overhead"].failed
        assert failed is not None
        assert failed.slug == "cudagraph-trees"
        memory = rows["reduce-overhead"].memory  # told by the process that failed
        assert memory is not None
        assert memory.peak_allocated_gib is not None
        assert memory.device_allocs is None  # it made no first step
        assert code == 1
