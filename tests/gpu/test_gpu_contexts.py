"""On two GPUs: what works on one opens no other, where a context takes half a GiB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import write_toml

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
DEVICE = "cuda:1"
OPENED = "cuda:0 was opened"
TELL = f"""
import sys, torch

def tell():
    assert torch._C._cuda_hasPrimaryContext(1), "cuda:1 was not even used"
    print(torch._C._cuda_hasPrimaryContext(0) and {OPENED!r}, file=sys.stderr)
"""
CASE = f"""{TELL}
if __name__ == "__main__":
    from bench_cases import measured, setting
    case, mode = sys.argv[1:]
    times_ms, _ = measured(case, setting(mode, devices=({DEVICE!r},), target_device={DEVICE!r}))
    assert times_ms
    tell()
"""
TRAIN = f"""{TELL}
if __name__ == "__main__":
    from dflash.cli.__main__ import main
    try:
        main()
    finally:
        tell()
"""


def ended(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    paths = [str(ROOT), str(ROOT / "tests" / "bench"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_a_program_that_opens_the_other_is_told() -> None:
    """The fault itself: without this the tests below could not fail."""
    with_torch_alone = f"""{TELL}
with torch.cuda.stream(torch.cuda.Stream({DEVICE!r})):
    torch.zeros(1, device={DEVICE!r})
tell()
"""
    assert OPENED in ended(with_torch_alone).stderr


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("drafter-step", "eager"),
        ("drafter-step", "reduce-overhead"),
        ("drafter-step", "graphed"),
        ("pipeline", "graphed"),
        ("decode", "captured"),
        ("mask", "captured"),
    ],
)
def test_a_bench_opens_the_gpu_that_it_measures(case: str, mode: str) -> None:
    done = ended(CASE, case, mode)
    assert done.returncode == 0, done.stderr
    assert OPENED not in done.stderr


def test_a_run_opens_the_gpu_that_it_trains_on(place: Path, tmp_path: Path) -> None:
    here = {"devices": (DEVICE,)}
    config = write_toml(tmp_path / "run.toml", place, target=here, drafter=here)
    done = ended(TRAIN, "train", str(config), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert OPENED not in done.stderr
