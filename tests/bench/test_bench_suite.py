"""``pytest dflash_bench``: benchmarks of pytest-benchmark with the figures of ``dflash bench``."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bench_subjects import Raising, Sound

from dflash_bench import test_cases
from dflash_bench.cases._case import Case, Setting
from dflash_bench.child import Child
from dflash_bench.conftest import Asked
from dflash_bench.device_clock import DeviceClock, TimedSteps
from dflash_bench.shapes import named_shape

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("suite") / "stored.json"
    chosen = "packing-best-fit or mask-launched or mask-captured"
    words = ["dflash_bench", "-k", chosen, "--bench-rounds", "7", "--bench-device", "cpu"]
    command = [sys.executable, "-m", "pytest", "-q", *words, "--benchmark-json", str(file)]
    # pytest-benchmark measures nothing in what looks like a worker of pytest-xdist
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_every_mode_that_can_run_is_a_benchmark_in_the_group_of_its_case(
    stored: dict[str, Any],
) -> None:
    found = {one["param"]: one["group"] for one in stored["benchmarks"]}
    assert found == {
        "mask-launched": "mask tiny fixed",
        "packing-best-fit": "packing tiny fixed",
    }


def test_the_statistics_are_those_of_the_same_steps_as_the_row(stored: dict[str, Any]) -> None:
    for one in stored["benchmarks"]:
        stats, row = one["stats"], one["extra_info"]
        assert stats["rounds"] == row["step_ms"]["count"] == 7
        assert stats["median"] * 1e3 == pytest.approx(row["step_ms"]["median"])
        assert stats["max"] * 1e3 == pytest.approx(row["step_ms"]["max"])
        assert stats["median"] == pytest.approx(statistics.median(stats["data"]))


def test_a_benchmark_says_where_and_at_what_it_was_measured(stored: dict[str, Any]) -> None:
    row = stored["benchmarks"][0]["extra_info"]
    assert row["state"] == "measured"
    assert row["sizes"]["token_budget"] == 256
    assert row["dtype"] == "float32"
    assert row["clock"] == "perf_counter"
    assert row["start_up"]["first_step_s"] > 0
    assert row["packages"]["torch"]
    assert stored["commit_info"]["id"]


def test_the_clock_moves_by_what_every_step_took(tmp_path: Path) -> None:
    clock = DeviceClock()
    make = partial(Sound, "A", tmp_path / "log")  # steps of 1 and 2 ms
    with Child("sound", make, limit_s=20.0) as child:
        child.start()
        child.prepare()
        steps = TimedSteps(child, clock)
        read = []
        for _ in range(3):
            before = clock()
            steps()
            read.append(round((clock() - before) * 1e3, 6))
        steps.forget_the_rest()
        assert read == [1.0, 2.0, 1.0]
        assert child.turns == [[1.0, 2.0], [1.0]]


def test_a_mode_that_fails_fails_its_benchmark_in_its_own_words(tmp_path: Path) -> None:
    make = partial(Raising, "A", tmp_path / "log")
    with Child("raising", make, limit_s=20.0) as child:
        child.start()
        child.prepare()
        with pytest.raises(RuntimeError, match="ValueError during turn: a tensor of the wrong"):
            TimedSteps(child, DeviceClock())()


class EndsBadly(Sound):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.mode, Path(os.devnull))

    def finish(self) -> dict[str, Any]:
        raise ValueError("there is no end to it")


class Rounds:
    """As much of pytest-benchmark's fixture as a benchmark uses."""

    group = ""
    extra_info: ClassVar[dict[str, Any]] = {}

    def pedantic(self, steps: Callable[[], None], *, rounds: int, **_: int) -> None:
        for _number in range(rounds):
            steps()


def test_a_mode_that_dies_at_its_end_fails_its_benchmark_too() -> None:
    case = Case(name="ends badly", help="", make=EndsBadly, modes=("only",))
    asked = Asked(shape=named_shape("tiny"), lengths="fixed", device="cpu", rounds=3)
    benchmark: Any = Rounds()
    with pytest.raises(pytest.fail.Exception, match="ValueError during finish: there is no end"):
        test_cases.test_case(benchmark, case=case, mode="only", asked=asked)
    assert not benchmark.extra_info
