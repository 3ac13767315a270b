"""Modes on torch's own cudagraph trees; the last file to run, since they stay in the process.

Capturing by hand after them failed once with an invalidated capture.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mode_cases import Trained, allocate_nothing, busy, goes_on, train

from dflash.drafter.training import StepInputs
from dflash.execution import Mode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Advice of the compiler about speed.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    # Torch begins its trees with one, and records the warning, which "error" would raise instead.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]
ROOT = Path(__file__).parents[2]


def test_warmed_replays_beside_a_busy_thread(
    trained: Callable[[Mode], Trained], data: list[StepInputs]
) -> None:
    compiled = trained("compiled")
    warmed = train("warmed", data, meanwhile=busy)
    assert warmed.runner.report.num_graphs > 0
    assert warmed.runner.report.worker_difference is not None
    torch.testing.assert_close(warmed.losses, compiled.losses, rtol=1e-3, atol=0)


def test_two_hundred_warmed_steps_allocate_nothing(place: Path, tmp_path: Path) -> None:
    allocate_nothing(place, tmp_path, "warmed")


def test_a_stopped_warmed_run_goes_on_as_if_nothing_had_been(place: Path, tmp_path: Path) -> None:
    goes_on(place, tmp_path, "warmed")


LAZY = """
import sys; sys.path[:0] = ["tests", "tests/gpu", "tests/drafter", "."]
import torch
from mode_cases import batches, train
from dflash.execution import CaptureError, capture_watch
capture_watch()
trained = train("reduce-overhead", batches(8))
assert trained.losses.isfinite().all(), trained.losses
print(dict(capture_watch().begun))
try:
    train("reduce-overhead", batches(2))
except CaptureError as error:
    print(error)
"""


def test_lazy_capture_happens_in_the_worker_and_a_second_worker_is_refused_where_it_dies() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAZY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    captured, *refused = done.stdout.splitlines()
    assert "drafter-0" in captured, captured
    assert "MainThread" not in captured, captured
    minor = int(torch.__version__.split(".")[1])
    if minor <= 12:
        assert "cannot capture on torch" in refused[0]
        assert "graphed" in refused[1]
