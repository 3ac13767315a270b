"""A user's own step in the place of a failure mode's, inside a child.

``--step mypackage.mymodule:make_step`` names a function: ``make_step(device)`` returns a callable
and a tuple of its inputs. The parent imports nothing of the user's; it reads the spelling alone.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from dflash.errors import UsageError

CALLS = 2
NOT_THEIRS = (f"{Path(__file__).parents[1]}/", f"{Path(importlib.__file__).parent}/", "<frozen ")
RETURNS = "make_step(device) returns a callable and a tuple of its inputs"


class WrongStepError(UsageError):
    """``--step`` names no step; raised in the child, and again by the parent."""


def require_spelling(step: str) -> None:
    """Check that *step* is ``module:function`` as Python imports it; imports nothing.

    Raises:
        UsageError: it is not; what it should be is suggested where it is a path.
    """
    module, sign, name = step.partition(":")
    if "/" in module or module.endswith(".py"):
        hint = _as_module(Path(module).resolve(), name or "make_step")
        raise UsageError(f"--step {step}: {module} is a path: write it as a module", hint=hint)
    if not (sign and all(module.split(".")) and name.isidentifier()):
        raise UsageError(
            f"--step {step!r} is not MODULE:FUNCTION",
            hint="for example --step mypackage.mymodule:make_step",
        )


def _as_module(path: Path, function: str) -> str:
    """How to write a file as a module: from the current folder, or from where its package is."""
    root = next(
        folder
        for folder in (Path.cwd(), *path.parents)
        if path.is_relative_to(folder)
        and (folder == Path.cwd() or not (folder / "__init__.py").exists())
    )
    dotted = ".".join(path.relative_to(root).parts).removesuffix(".py").removesuffix(".__init__")
    before = "" if root == Path.cwd() else f"set PYTHONPATH={root} and write "
    return f"{before}--step {dotted}:{function}"


def wrong_step(message: str) -> WrongStepError | None:
    """The error again that a child ended in, as *message* tells of it; None if that is another."""
    kind, _, told = message.partition(": ")
    what, _, hint = told.partition("\n  hint: ")
    return WrongStepError(what, hint=hint) if kind == WrongStepError.__name__ else None


def program_with_step(words: argparse.Namespace) -> Callable[[], float]:
    """What the child runs: the mode around the step, or, as "own", the step alone."""
    from dflash.diagnose.child import find_mode

    if words.variant == "own":
        return lambda: run_alone(words.step)
    mode, make_step = find_mode(words.address), load_step(words.step)
    return lambda: float(
        mode.reproduce_step(make_step, faulty=words.variant == "faulty", seed=words.seed)
    )


def load_step(name: str) -> Callable[..., Any]:
    """Import ``module:function``.

    Raises:
        WrongStepError: there is no such module, or no such function in it.
    """
    wanted, _, function = name.partition(":")
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{wanted}.".startswith(f"{missing}.") or theirs(error) is not None:
            raise  # something that their module imports
        raise _no_module(name, missing) from None
    made: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(made):
        raise _no_function(name, module, function)
    return made


def run_alone(name: str) -> float:
    """Call the step twice in the main thread of a fresh process; what it raises is its own."""
    make_step = load_step(name)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, inputs = _pair(name, make_step(device))
    for _ in range(CALLS):
        step(*inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 0.0


def _pair(name: str, made: object) -> tuple[Callable[..., object], Sequence[object]]:
    match made:
        case [step, [*_] as inputs] if callable(step):
            return step, inputs
        case tuple():
            got = f"({', '.join(type(each).__name__ for each in made)})"
        case _:
            got = type(made).__name__
    what = f"--step {name}: it returned {got}, not a callable and a tuple of its inputs"
    raise WrongStepError(what, hint="for example: return step, (x,)")


def theirs(error: BaseException) -> TracebackType | None:
    """The traceback of *error* from the user's first frame on; None where all are ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(NOT_THEIRS):
        frames = frames.tb_next
    return frames


def _no_module(name: str, missing: str) -> WrongStepError:
    parent, _, last = missing.rpartition(".")
    if parent:
        folders = list(getattr(sys.modules.get(parent), "__path__", ()))
        place = f"in {', '.join(folders)}"
        if not folders:
            what = f"--step {name}: {parent} is a module and holds no module {last}"
            return WrongStepError(what, hint=f"--step {parent}:FUNCTION names a function of it")
    else:
        folders = [str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        place = f"from {Path.cwd()}"
    near = difflib.get_close_matches(last, set(_modules_in(folders)), n=1)
    hint = f"run it from the folder that holds {missing.partition('.')[0]}, or set PYTHONPATH to it"
    if near:
        hint = f"did you mean {f'{parent}.' if parent else ''}{near[0]}? Otherwise {hint}"
    return WrongStepError(f"--step {name}: there is no module {missing}, {place}", hint=hint)


def _modules_in(folders: Iterable[str]) -> Iterator[str]:
    for folder in filter(os.path.isdir, folders):
        for path in Path(folder).glob("*"):
            if (path.suffix == ".py" or path.is_dir()) and path.stem.isidentifier():
                yield path.stem


def _no_function(name: str, module: ModuleType, function: str) -> WrongStepError:
    functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
    place = getattr(module, "__file__", None) or module.__name__
    near = difflib.get_close_matches(function, functions, n=1)
    hint = f"did you mean {near[0]}?" if near else f"define {function}(device) in {place}"
    what = f"--step {name}: module {module.__name__} has no function {function}"
    return WrongStepError(what, hint=hint)
