"""Programs of the measurements: what of them a machine without a GPU can run."""

import ast
import importlib.util
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._inductor import cudagraph_trees

from dflash.execution import behaviour_of
from dflash.failures import _trees

PROGRAMS = Path(__file__).parents[2] / "docs" / "measurements" / "programs"
CROSS_WIRED = PROGRAMS / "cross_wired_backward.py"
MAX_LINES = 30
every_program = pytest.mark.parametrize(
    "path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem
)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every_program
def test_a_program_says_in_one_line_that_it_needs_a_gpu(path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, env=hidden)  # noqa: PLW1510
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert "CUDA GPU" in line


@every_program
def test_a_program_imports_nothing_of_ours(path: Path) -> None:
    assert "dflash" not in path.read_text(encoding="utf-8")


def test_the_program_of_a_bug_report_has_thirty_lines() -> None:
    text = CROSS_WIRED.read_text(encoding="utf-8")
    below = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    assert sum(bool(line.strip()) for line in below) <= MAX_LINES


def test_the_program_tells_that_a_backward_ran_in_the_manager_of_the_first_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own wiring; a manager that captures nothing, and a thread instead of autograd's."""
    if behaviour_of(torch.__version__).captures_in == "main":
        pytest.skip("up to torch 2.12 a thread has no manager of its own")
    program = loaded(CROSS_WIRED)

    class Manager(_trees.StandInManager):
        """Adds and runs functions as torch's does."""

        def __init__(self, device_index: int) -> None:
            super().__init__(device_index)
            self.id_to_mode: dict[int, Any] = {}

        def add_function(self, _model: object, inputs: list[str], *rest: Any, **_: Any) -> Any:  # noqa: ANN401
            number = len(self.id_to_mode)
            self.id_to_mode[number] = rest[2]
            run = partial(self.run, function_id=number)
            return run, run(inputs)

        def run(self, inputs: list[str], function_id: int) -> None:
            program.noted(self, inputs, function_id, run=lambda *_: ran.append((self, *inputs)))

    ran: list[tuple[Manager, str]] = []
    monkeypatch.setattr(cudagraph_trees, "CUDAGraphTreeManager", Manager)  # and back at the end
    monkeypatch.setattr(_trees, "StandInManager", Manager)
    monkeypatch.setattr(_trees, "CARRIED", (*_trees.CARRIED, "seen"))
    forward, backward = _trees.stand_in_graph(), _trees.stand_in_graph(is_backward=True)
    autograd, seen = _trees.AutogradThread(), {"A": set[str](), "B": set[str]()}

    def train(trainer: str) -> None:
        torch._C._stash_obj_in_tls("seen", seen[trainer])  # noqa: SLF001
        for _ in range(2):
            forward([trainer])
            autograd.run(partial(backward, [trainer]))

    for trainer in "AB":
        thread = threading.Thread(target=train, args=(trainer,))
        thread.start()
        thread.join()
    a, b = (next(manager for manager, whose in ran if whose == trainer) for trainer in "AB")
    assert a is not b
    assert seen["A"] == {f"FORWARD in {id(a)}", f"BACKWARD in {id(a)}"}
    assert seen["B"] == {f"FORWARD in {id(b)}", f"BACKWARD in {id(a)}"}
