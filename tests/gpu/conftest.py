"""What the tests of execution modes train once and share."""

from collections.abc import Callable

import pytest
from mode_cases import Trained, batches, train

from dflash.drafter.training import StepInputs
from dflash.execution import Mode

NUM_STEPS = 50


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
