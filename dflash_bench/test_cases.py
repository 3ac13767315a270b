"""Every case in every mode as a benchmark of pytest-benchmark: ``pytest dflash_bench``.

Each runs in a process of its own, so that one mode's graphs, seal or crash are no other's. The
clock is the device's, so the statistics are those of the same steps that ``dflash bench`` times;
the figures that it would report besides are in ``extra_info``.
"""

from functools import partial
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from dflash.environment import environment
from dflash_bench.cases import all_cases
from dflash_bench.cases._case import Case, Setting
from dflash_bench.child import Child, state_of
from dflash_bench.conftest import Asked
from dflash_bench.device_clock import TimedSteps, device_clock
from dflash_bench.planned import dtype_on
from dflash_bench.rows import Beside, row_of

TURN_STEPS = 5
LIMIT_S = 600.0
EVERY_MODE = [
    pytest.param(case, mode, id=f"{case.name}-{mode}")
    for case in all_cases().values()
    for mode in case.modes
]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.benchmark(timer=device_clock)
@pytest.mark.parametrize(("case", "mode"), EVERY_MODE)
def test_case(benchmark: BenchmarkFixture, *, case: Case, mode: str, asked: Asked) -> None:
    setting = Setting(
        shape=asked.shape,
        mode=mode,
        lengths=asked.lengths,
        devices=(asked.device,),
        target_device=asked.device,
        turn_steps=TURN_STEPS,
    )
    if why := case.why_not(setting):
        pytest.skip(why)
    benchmark.group = f"{case.name} {asked.shape.name} {asked.lengths}"
    with Child(mode, partial(case.make, setting), limit_s=LIMIT_S) as child:
        child.start()
        child.prepare()
        child.settle()
        steps = TimedSteps(child)
        benchmark.pedantic(  # type: ignore[no-untyped-call]
            steps, rounds=asked.rounds, warmup_rounds=0, iterations=1
        )  # a case has its own untimed steps before every turn
        steps.forget_the_rest()
        child.finish()
        if child.failure is not None:
            pytest.fail(state_of(child))
        benchmark.extra_info.update(_figures(case, setting, child))


def _figures(case: Case, setting: Setting, child: Child) -> dict[str, Any]:
    row = row_of(case, setting, child, beside=Beside())
    there = environment(with_torch=True)
    return {
        **row.model_dump(mode="json", exclude={"turns_ms"}),
        "clock": "events on the device" if setting.devices[0] != "cpu" else "perf_counter",
        "dtype": str(dtype_on(setting.devices[0])).removeprefix("torch."),
        "sizes": setting.shape.record(),
        "gpus": [gpu.name for gpu in there.gpus],
        "packages": there.packages,
    }
