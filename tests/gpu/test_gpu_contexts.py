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
    from functools import partial
    from bench_cases import setting
    from dflash_bench.cases import all_cases
    from dflash_bench.own_process import Numbered
    case, mode = sys.argv[1:]
    asked = setting(mode, devices=({DEVICE!r},), target_device={DEVICE!r})
    subject = Numbered(partial(all_cases()[case].make, asked), devices=asked.devices, uuids={{}})()
    subject.build()
    subject.prepare()
    assert subject.turn()
    subject.finish()
    tell()
"""
COMMAND = f"""{TELL}
if __name__ == "__main__":
    from dflash.cli.__main__ import main
    try:
        main()
    finally:
        tell()
"""


def ended(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    paths = [str(ROOT), str(ROOT / "tests" / "bench"), *sys.path]
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
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


def test_training_and_decoding_open_the_gpu_that_they_are_on(place: Path, tmp_path: Path) -> None:
    here, run = {"devices": (DEVICE,)}, str(tmp_path / "run")
    config = write_toml(tmp_path / "run.toml", place, target=here, drafter=here)
    trained = ended(COMMAND, "train", str(config), "--run-dir", run)
    assert trained.returncode == 0, trained.stderr
    assert OPENED not in trained.stderr
    decoded = ended(COMMAND, "generate", run, "--prompt", "def f", "--device", DEVICE)
    assert decoded.returncode == 0, decoded.stderr
    assert OPENED not in decoded.stderr
