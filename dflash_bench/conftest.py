"""Options of ``pytest dflash_bench``."""

from dataclasses import dataclass

import pytest
import torch

from dflash_bench.cases._case import Lengths
from dflash_bench.shapes import BenchShape, named_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the suite measures; a round of pytest-benchmark is a timed step."""

    shape: BenchShape
    lengths: Lengths
    device: str
    rounds: int


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dflash", "what dflash's benches measure")
    group.addoption("--bench-shape", default="tiny", help="as dflash bench --shape")
    group.addoption("--bench-lengths", default="fixed", choices=("fixed", "variable"))
    group.addoption("--bench-device", default="auto", help="cpu or cuda:N")
    group.addoption("--bench-rounds", default=20, type=int, help="timed steps of every mode")


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Asked:
    device = request.config.getoption("--bench-device")
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return Asked(
        shape=named_shape(request.config.getoption("--bench-shape")),
        lengths=request.config.getoption("--bench-lengths"),
        device=device,
        rounds=request.config.getoption("--bench-rounds"),
    )
