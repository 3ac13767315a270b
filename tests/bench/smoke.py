"""``nox -s bench-smoke``: the whole command on a CPU, and what must hold of any bench.

Not one of the ordinary tests, since it compiles; no time is compared with another here.
"""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from dflash.execution import CAPTURING, Mode
from dflash.measurement import Bench, Row
from dflash_bench.files import read_bench
from dflash_bench.lengths import batch_lengths

MODES = get_args(Mode)
OPTIONS = "--device cpu --shape tiny --set drafter.num_layers=1 --steps 4 --pairs 4 --max-time 4"


def run_bench(folder: Path, *words: str) -> Path:
    out = [f"--{kind}={folder / f'bench.{kind}'}" for kind in ("json", "html", "markdown")]
    command = [sys.executable, "-m", "dflash.cli.__main__", "bench", *OPTIONS.split(), *out]
    ended = subprocess.run([*command, *words], check=False, timeout=160, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    (folder / "screen").write_bytes(ended.stdout)
    (folder / "talk").write_bytes(ended.stderr)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def bench(files: Path) -> Bench:
    return read_bench(files / "bench.json")


def measured(bench: Bench) -> list[Row]:
    return [row for row in bench.rows if row.state == "measured"]


def test_every_mode_is_a_row_and_all_that_a_cpu_can_run_are_measured(bench: Bench) -> None:
    found = {row.mode: row.state for row in bench.rows}
    assert found == {mode: "skipped" if mode in CAPTURING else "measured" for mode in MODES}
    assert all(row.why for row in bench.rows if row.state == "skipped")
    assert bench.complete


def test_spreads_and_intervals_are_in_order(bench: Bench) -> None:
    for row in measured(bench):
        assert row.step_ms is not None
        assert row.per_s is not None
        assert 0 < row.step_ms.p10 <= row.step_ms.median <= row.step_ms.p90 <= row.step_ms.max
        assert row.step_ms.count == sum(map(len, row.turns_ms))
        assert row.per_s.low <= row.per_s.value <= row.per_s.high
    assert {one.row for one in bench.comparisons} == {
        row.name for row in measured(bench) if row.mode == "compiled"
    }
    assert all(one.ratio.low <= one.ratio.value <= one.ratio.high for one in bench.comparisons)
    assert all(one.pairs >= 4 for one in bench.comparisons)


def test_start_up_holds_its_parts_and_only_compiling_modes_compile(bench: Bench) -> None:
    for row in measured(bench):
        start = row.start_up
        assert start is not None
        assert start.build_s is not None
        assert start.first_step_s > start.build_s + (start.warm_up_s or 0.0)
        assert len(start.first_steps_ms) > 1
        assert start.capture_s == 0.0
        if row.mode == "compiled":
            assert start.compile_s is not None
            assert start.compile_s > 0.0


def test_a_fixed_shape_compiles_once(bench: Bench) -> None:
    for row in measured(bench):
        assert row.graphs is not None
        assert row.graphs.recompiles == row.graphs.captured == 0


def test_varying_lengths_count_real_tokens_only(tmp_path: Path) -> None:
    found = read_bench(run_bench(tmp_path, "--lengths=variable", "--mode=eager") / "bench.json")
    (row,) = found.rows
    lengths = batch_lengths(256, on_gpu=False)
    times_s = [sum(turn) / 1e3 for turn in row.turns_ms]
    assert row.lengths == "variable"
    assert not row.padded
    assert row.per_s is not None
    num_steps = sum(map(len, row.turns_ms))  # every turn has every length as often
    mean = sum(lengths) / len(lengths)
    assert row.per_s.value == pytest.approx(mean * num_steps / sum(times_s))


def test_modes_agree_on_the_loss(bench: Bench) -> None:
    for row in measured(bench):
        assert row.loss_against_eager is not None
        assert abs(row.loss_against_eager) < 1e-4


def test_only_results_are_on_the_screen_and_every_file_is_whole(files: Path) -> None:
    screen = (files / "screen").read_text()
    assert max(map(len, screen.splitlines())) <= 78
    assert "making ready" not in screen
    assert "making ready" in (files / "talk").read_text()
    assert "leaked" not in (files / "talk").read_text()
    page = (files / "bench.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert 'src="http' not in page
    for mode in MODES:
        assert mode in screen
        assert mode in page
        assert mode in (files / "bench.markdown").read_text()
