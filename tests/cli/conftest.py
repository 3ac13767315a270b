"""A run that commands of the tests can read, and a bench that they need not measure."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import write_checkpoint

from dflash.config import DataConfig, DrafterConfig, RunConfig, TargetConfig, to_toml
from dflash.config.sections import EvalConfig, OptimConfig
from dflash.drafter.model import Drafter
from dflash.measurement import Bench
from dflash.target.model import Target
from dflash.target.shape import default_shape
from dflash_bench import scaling, session
from dflash_bench.session import BenchPlan

TEXT = "import os\n\n\ndef main(argv):\n    return os.path.join(argv[0], 'name')\n" * 3


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint of a small random drafter for stdlib-lm."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    target = Target.load("stdlib-lm", taps=2, device="cpu", dtype=torch.float32)
    sizes = DrafterConfig(num_layers=1, block_size=4, intermediate_size=64)
    drafter = Drafter(default_shape(target, sizes))
    drafter.initialise(0)
    write_checkpoint(
        run / "checkpoints" / "step-00000040",
        drafter,
        target=("stdlib-lm", target.fingerprint),
    )
    heldout = run / "heldout.py"
    heldout.write_text(TEXT)
    config = RunConfig(
        target=TargetConfig(model="stdlib-lm"),
        data=DataConfig(train=("other.py",), heldout=(str(heldout),), max_document_tokens=64),
        optim=OptimConfig(max_steps=40),
        eval=EvalConfig(num_prompts=2),
    )
    (run / "config.toml").write_text(to_toml(config))
    return run


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], list[BenchPlan]]:
    """Put a made-up bench in the place of measuring; the list holds the plans that were asked."""

    def with_bench(bench: Bench) -> list[BenchPlan]:
        plans: list[BenchPlan] = []

        def run(plan: BenchPlan, *_: object, say: Callable[[str], None]) -> Bench:
            plans.append(plan)
            say("measuring")
            return bench

        monkeypatch.setattr(session, "run_bench", run)
        monkeypatch.setattr(scaling, "run_scaling", run)
        return plans

    return with_bench
