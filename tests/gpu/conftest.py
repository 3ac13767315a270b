"""What the tests of execution modes train once and share."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config
from mode_cases import Trained, batches, train

from dflash.drafter.training import StepInputs
from dflash.execution import Mode

NUM_STEPS = 50


@pytest.fixture(scope="session", autouse=True)
def kernels_chosen_by_rule() -> Iterator[None]:
    """Let Inductor choose a reduction's tiles without timing them (pytorch#189121).

    Else two compilations of one step may differ in the order of a sum, and so in its last bits. Its
    option "deterministic" is no help: Dynamo sets it back with every frame that it compiles.
    """
    by_rule = {"dynamic_scale_rblock": False, "test_configs.force_filter_reduction_configs": True}
    with torch._inductor.config.patch(by_rule):  # noqa: SLF001
        yield


@pytest.fixture(scope="session")
def data() -> list[StepInputs]:
    return batches(NUM_STEPS)


@pytest.fixture(scope="session")
def trained(data: list[StepInputs]) -> Callable[[Mode], Trained]:
    """Fifty steps in a mode, made once."""
    made: dict[str, Trained] = {}

    def in_mode(mode: Mode) -> Trained:
        if mode not in made:
            made[mode] = train(mode, data)
            made[mode].runner.close()
        return made[mode]

    return in_mode
