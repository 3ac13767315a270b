"""A mistake in a call is told at once: before torch is imported, which takes seconds."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from dflash.execution import Mode
from dflash.failures import all_modes, all_slugs
from dflash_bench.cases import EXECUTION_MODES, MODES, all_cases

ROOT = Path(__file__).parents[2]
BLOCKED = (
    "import sys; sys.modules.update(torch=None, transformers=None)\n"
    "from dflash.cli.__main__ import main\n"
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain all", "is not one failure mode"),
        ("explain lable-shift", "there is no failure mode 'lable-shift'"),
        ("diagnose lable-shift", "there is no failure mode 'lable-shift'"),
        ("bench dekode", "there is no case 'dekode'"),
        ("bench --mode graphd", "there is no mode 'graphd'"),
        ("bench --shape tinny", "there is no shape 'tinny'"),
        ("bench --shape tiny --set token_bugdet=4", "a shape has no token_bugdet"),
        (
            "bench --shape tiny --set token_budget=4",
            "token_budget cannot be 4: it comes in multiples of 128",
        ),
        ("bench --config missing.toml", "no configuration file at missing.toml"),
        ("bench --config bad.toml", "optim.lr: expected a number, above 0"),
        ("bench --lengths some", "--lengths some is neither"),
        ("bench --precision 0", "--precision 0 is no share"),
        ("bench --expect graphed/eagr>=3", "there is no mode 'eagr'"),
        ("bench scaling --values 1", "two or more different whole numbers"),
        ("bench scaling --values 1,2 --mode graphd", "there is no mode 'graphd'"),
        ("bench compare a.json b.json", "a.json cannot be read"),
        ("export RUN . --to z-lab", "holds the current one"),
        ("export RUN out --target x", "--target belongs to --to speculators"),
        ("generate RUN", "give either --prompt or --chat"),
        ("train bad.toml", "optim.lr: expected a number, above 0"),
    ],
)
def test_a_mistake_is_told_without_torch(tmp_path: Path, words: str, told: str) -> None:
    bad = '[target]\nmodel = "m"\n[data]\ntrain = ["t"]\n[optim]\nepochs = 2\nlr = -1\n'
    (tmp_path / "bad.toml").write_text(bad)
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert told in ran.stderr


def test_the_names_that_are_known_without_torch_are_those_of_the_cases_and_pages() -> None:
    assert {case.name: case.modes for case in all_cases().values()} == MODES
    assert get_args(Mode) == EXECUTION_MODES
    assert list(all_slugs()) == [mode.slug for mode in all_modes()]
