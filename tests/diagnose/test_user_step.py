"""A step that cannot be found is told as that, and what a step raises as its author's own."""

import os
import re
import sys
from pathlib import Path

import fake_modes
import pytest

from dflash.diagnose import session
from dflash.diagnose.examine import Plan, examine
from dflash.diagnose.machine import Machine
from dflash.environment import environment
from dflash.errors import UsageError
from dflash.failures import all_modes

DOCS = Path(__file__).parents[2] / "docs" / "diagnose.md"
MODULE = """
import os
from pathlib import Path

Path("importer").write_text(str(os.getpid()))
LIMIT = 3

def make_step(device):
    return (lambda x: x), (1.0,)

def nothing(device):
    pass

def bare(device):
    return make_step, 1.0

def broken(device):
    def step(x):
        return x[0]
    return step, (1.0,)

def unready():
    pass
"""
MACHINE = Machine("2.13.0", 0, 2, environment(with_torch=False))


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``mypackage.mymodule`` in the current folder, where this process could import it too."""
    folder = tmp_path / "work"
    (folder / "mypackage").mkdir(parents=True)
    (folder / "mypackage" / "mymodule.py").write_text(MODULE)
    (folder / "mypackage" / "importing.py").write_text("import torch\nimport not_installed\n")
    (folder / "mypackage" / "unparsable.py").write_text("def make_step(:\n")
    other = tmp_path / "other" / "theirs" / "inner"
    other.mkdir(parents=True)
    for place in (other, other.parent):
        (place / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    return folder


def refusal(step: str) -> UsageError:
    with pytest.raises(UsageError) as refused:
        session.diagnose([fake_modes.STEPPED], MACHINE, plan=Plan(step=step))
    assert refused.value.exit_code == 2
    return refused.value


@pytest.mark.parametrize(
    ("step", "what", "hint"),
    [
        ("mypackage.nope:x", "there is no module mypackage.nope, in HERE/mypackage", "PYTHONPATH"),
        ("nope.mymodule:x", "there is no module nope, from HERE", "the folder that holds nope, or"),
        ("mypackage.mymodul:x", "there is no module mypackage.mymodul,", "mypackage.mymodule?"),
        ("mypackag.mymodule:x", "there is no module mypackag,", "did you mean mypackage? Otherw"),
        ("mypackage.mymodule.x:y", "mypackage.mymodule is a module and", "mypackage.mymodule:FUN"),
        (
            "mypackage.mymodule:makestep",
            "module mypackage.mymodule has no function makestep",
            "did you mean make_step?",
        ),
        (
            "mypackage.mymodule:qqq",
            "module mypackage.mymodule has no function qqq",
            "define qqq(device) in HERE/mypackage/mymodule.py",
        ),
        ("mypackage.mymodule:LIMIT", "has no function LIMIT", "define LIMIT(device) in HERE"),
        ("mypackage:make_step", "module mypackage has no function make_step", "in mypackage"),
        ("mypackage.mymodule:nothing", "it returned NoneType, not a callable", "return step, (x,)"),
        ("mypackage.mymodule:bare", "it returned (function, float), not a", "return step, (x,)"),
    ],
)
def test_what_the_name_of_a_step_lacks_is_said_and_not_blamed_on_the_step(
    step: str, what: str, hint: str, *, package: Path
) -> None:
    error = refusal(step)
    assert error.what.startswith(f"--step {step}: ")
    assert what.replace("HERE", str(package)) in error.what
    assert hint.replace("HERE", str(package)) in error.hint
    assert "fails on its own" not in str(error)
    assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        ("mypackage/mymodule.py:make_step", "--step mypackage.mymodule:make_step"),
        ("./mypackage/mymodule:make_step", "--step mypackage.mymodule:make_step"),
        ("mypackage/mymodule.py", "--step mypackage.mymodule:make_step"),
        ("mymodule.py:mine", "--step mymodule:mine"),
        (
            "../other/theirs/inner/steps.py:mine",
            "set PYTHONPATH=ABOVE/other and write --step theirs.inner.steps:mine",
        ),
        (
            "../other/theirs/inner/__init__.py:mine",
            "set PYTHONPATH=ABOVE/other and write --step theirs.inner:mine",
        ),
    ],
)
def test_a_path_is_refused_without_a_launch_and_written_as_a_module(
    step: str, hint: str, package: Path, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "run_orders", lambda _: pytest.fail("it was launched"))
    error = refusal(step)
    assert error.what == f"--step {step}: {step.partition(':')[0]} is a path: write it as a module"
    assert error.hint == hint.replace("ABOVE", str(package.parent))


@pytest.mark.parametrize("step", [".mymodule:x", "mypackage..mymodule:x", "mypackage:a.b", "a:"])
def test_what_python_could_not_import_is_refused_without_a_launch(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "run_orders", lambda _: pytest.fail("it was launched"))
    assert "is not MODULE:FUNCTION" in refusal(step).what


@pytest.mark.parametrize(
    ("step", "first_line", "last_line"),
    [
        ("mypackage.mymodule:broken", "return x[0]", "TypeError: 'float' object is not subscr"),
        ("mypackage.importing:x", "import not_installed", "ModuleNotFoundError: No module named"),
        ("mypackage.unparsable:x", "def make_step(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_traceback_begins_in_the_users_own_code(
    step: str, first_line: str, last_line: str, *, package: Path
) -> None:
    error = refusal(step)
    assert error.what.startswith(f"{step} fails on its own, with no failure mode around it: ")
    lines = [line.strip() for line in error.what.splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    assert len(frames) == 1
    assert frames[0].startswith(f'File "{package}/mypackage/')
    assert lines[lines.index(frames[0]) + 1] == first_line
    assert lines[-1].startswith(last_line)


def test_a_step_that_takes_no_device_is_said_so_in_one_line() -> None:
    error = refusal("mypackage.mymodule:unready")
    assert error.what.endswith("unready() takes 0 positional arguments but 1 was given")
    assert len(error.what.splitlines()) == 1


def test_only_children_import_what_is_the_users(package: Path) -> None:
    refusal("mypackage.mymodule:broken")
    assert int((package / "importer").read_text()) != os.getpid()
    assert "mypackage" not in sys.modules


def test_the_documentation_says_which_modes_take_a_step_on_a_cpu() -> None:
    shown = dict(re.findall(r"dflash diagnose (\S+) --step \S+ +# (.*)", DOCS.read_text()))
    plan = Plan(step="mypackage.mymodule:make_step", trials=1)
    for mode in all_modes():
        if mode.reproduce_step is None:
            assert mode.slug not in shown
        elif mode.device == "cpu":
            assert shown[mode.slug] == "a CPU is enough"
        else:
            assert shown[mode.slug] == "needs a CUDA GPU"
            (found,) = examine([mode], MACHINE, plan=plan)
            assert found.verdict == "not applicable"
