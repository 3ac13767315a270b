"""Runs one case as a session does, in this process or in one of its own."""

from functools import partial
from typing import Any

from dflash_bench.cases import all_cases
from dflash_bench.cases._case import Setting
from dflash_bench.child import Child
from dflash_bench.shapes import named_shape

TINY = named_shape("tiny")


def setting(mode: str, **changes: Any) -> Setting:  # noqa: ANN401
    return Setting(**{"shape": TINY, "mode": mode, "turn_steps": 3, **changes})


def measured(
    case: str, asked: Setting, *, num_turns: int = 2
) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of all timed steps, and all that the subject told."""
    subject: Any = all_cases()[case].make(asked)
    facts = {**subject.build(), **subject.prepare()}
    if hasattr(subject, "settle"):
        facts["first_steps_ms"] = [*facts.get("first_steps_ms", []), *subject.settle()]
    turns = [subject.turn() for _ in range(num_turns)]
    return [time_ms for turn in turns for time_ms in turn], {**facts, **subject.finish()}


def measured_apart(case: str, asked: Setting) -> Child:
    """The same in a process, which has ended."""
    make = partial(all_cases()[case].make, asked)
    with Child(asked.mode, make, limit_s=280.0) as child:
        child.start()
        child.prepare()
        child.settle()
        child.turn()
        child.finish()
    return child
