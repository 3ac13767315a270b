"""``dflash train`` in a process of its own: signals, kills, hangs and memory."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    assert_same_tensors,
    checkpoint,
    events_of,
    run,
    steps_of,
    tiny_config,
    write_toml,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command leaves behind, it leaves in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def start(*arguments: str, code: str = "") -> "subprocess.Popen[str]":
    """The command in a process of its own; *code* runs before it, to break something."""
    program = f"{code}\nimport sys\nfrom dflash.cli.__main__ import main\nsys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: "subprocess.Popen[str]", text: str) -> None:
    """Read what the process says until *text* comes."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended without saying {text!r}")


BREAK = """
import ctypes
import dflash.train.build as build
real = build.assemble
def broken(*arguments, **options):
    if arguments[2] == 6:
        {harm}
    return real(*arguments, **options)
build.assemble = broken
"""

TELL = """
import sys
from dflash.train.boundary import Boundary
close = Boundary.__call__
def told(self, number, *arguments):
    ended = close(self, number, *arguments)
    print(f"step {number} is over", file=sys.stderr, flush=True)
    return ended
Boundary.__call__ = told
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_hundred_steps_are_some_a_signal_and_the_rest(
    place: Path, tmp_path: Path, signum: int
) -> None:
    toml = write_toml(tmp_path / "hundred.toml", place, optim={"max_steps": 100})
    command = ["train", str(toml), "--run-dir", "parts", "--progress", "plain"]
    first = start(*command)
    wait_for(first, "step 40/100")
    first.send_signal(signum)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 75
    assert "stopped by a signal; run the same command again to go on" in out
    second = start(*command)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "step 100 of 100" in out
    run(tiny_config(place, optim={"max_steps": 100}), tmp_path / "whole")
    assert_same_tensors(checkpoint(tmp_path / "parts", 100), checkpoint(tmp_path / "whole", 100))
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    (stopped,) = events_of(tmp_path / "parts", "stopped")
    assert stopped.detail == {"signal": signum}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_steps", "left"),
    [
        (2, "the last checkpoint stands: step-00000006"),
        (100, "there is no checkpoint yet, so the same command begins again"),
    ],
)
def test_a_second_interrupt_ends_at_once(
    place: Path, tmp_path: Path, *, every_steps: int, left: str
) -> None:
    """The loader hangs in a C call, so the step that the first one waits for never comes."""
    changes: dict[str, Any] = {"checkpoint": {"every_steps": every_steps}}
    toml = write_toml(tmp_path / "long.toml", place, optim={"max_steps": 10**6}, **changes)
    hang = BREAK.format(harm="ctypes.CDLL(None).sleep(60)")
    process = start("train", str(toml), "--run-dir", "here", code=hang + TELL)
    wait_for(process, "step 6 is over")  # six batches were assembled: no other step comes
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - started < 5.0
    assert f"stopped at once by a second signal; {left}" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm", ["ctypes.CDLL(None).sleep(60)", "__import__('threading').Event().wait(60)"]
)
def test_a_hang_ends_the_process_with_the_stacks_written(
    place: Path, tmp_path: Path, harm: str
) -> None:
    toml = write_toml(tmp_path / "hang.toml", place)
    process = start(
        "train", str(toml), "--run-dir", "here", "--watchdog", "3", code=BREAK.format(harm=harm)
    )
    wait_for(process, "step 4/")
    started = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 5
    assert time.monotonic() - started < 10.0
    assert "error: no thread of the pipeline made progress for 3 s" in err
    stacks = (tmp_path / "here" / "stacks.txt").read_text()
    for name in ("loader", "target-0", "drafter-0", "MainThread"):
        assert f"is {name}\n" in stacks
    assert "in broken" in stacks


@pytest.mark.slow
def test_a_worker_s_death_is_told_once(place: Path, tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "dies.toml", place)
    process = start("train", str(toml), "--run-dir", "here", code=BREAK.format(harm="1 / 0"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 14
    assert "error: worker loader died of ZeroDivisionError: division by zero" in err
    assert err.count("Traceback (most recent call last)") == 1
    assert "hint: there is no checkpoint yet: the same command begins again" in err
    assert not (tmp_path / "here" / "checkpoints").exists()
    again = start("train", str(toml), "--run-dir", "here", "--max-steps", "4")
    again.communicate(timeout=60)
    process = start("train", str(toml), "--run-dir", "here", code=BREAK.format(harm="1 / 0"))
    _, err = process.communicate(timeout=60)
    assert "hint: the same command goes on from its last checkpoint, step-00000004" in err


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from dflash.cli.__main__ import main
from dflash.train.stored import check_files, complete_checkpoints, read_manifest

def newest():
    # By name: the run may delete what is looked at.
    folders = complete_checkpoints(run_dir)
    return int(folders[-1].name.removeprefix("step-")) if folders else 0

# Children that are forked from a process that has loaded everything once start in milliseconds.
main([*sys.argv[1:3], "--dry-run"])
command, run_dir = sys.argv[1:], Path("killed")
random.seed(4)
steps, startup_s = [0], 0.0
for kill in range(20):
    # Moments go by what the run has reached: a machine that others use is slow at times. Most
    # fall after some new checkpoints, others while the run starts.
    first, wanted, begun = newest(), random.randrange(5) if kill else 1, time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(main(command))
    while newest() < first + 2 * wanted:
        if time.monotonic() - begun > 60:
            os.kill(child, signal.SIGKILL)
            sys.exit(f"no {wanted} checkpoints in 60 s after {kill} kills")
        time.sleep(0.002)
    startup_s = startup_s or time.monotonic() - begun
    time.sleep(random.uniform(0, 0.2 if wanted else 1.0) * startup_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        sys.exit(f"the run ended by itself with {os.WEXITSTATUS(status)} after {kill} kills")
    for folder in complete_checkpoints(run_dir):
        manifest = read_manifest(folder)
        check_files(folder, manifest, manifest.files)
        steps.append(manifest.step)
print(f"{len(set(steps))} different steps, up to {max(steps)}", file=sys.stderr)
sys.exit(main(command))
"""


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(place: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optim": {"max_steps": 600}, "checkpoint": {"every_steps": 2}}
    toml = write_toml(tmp_path / "kills.toml", place, **changes)
    command = ["train", str(toml), "--run-dir", "killed", "--progress", "none"]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    different = re.search(r"(\d+) different steps", done.stderr)
    assert different is not None
    assert int(different[1]) > 20, "kills fell while it was training"
    run(tiny_config(place, **changes), tmp_path / "whole")
    assert_same_tensors(checkpoint(tmp_path / "killed", 600), checkpoint(tmp_path / "whole", 600))
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.partial"))


@pytest.mark.slow
def test_memory_stays_flat_over_five_hundred_steps(place: Path, tmp_path: Path) -> None:
    """Buffers are allocated once. The first hundred steps fill caches of torch and malloc; after
    them 4 MiB are left for the fragmentation that records and checkpoints bring."""
    config = tiny_config(place, optim={"max_steps": 600}, log={"every_steps": 50})
    resident: dict[int, float] = {}

    def show(record: Any) -> None:  # noqa: ANN401
        if record.kind == "step":
            resident[record.step] = record.rss_gib * 1024

    run(config, tmp_path / "run", show=show)
    assert resident[600] - resident[100] < 4.0
