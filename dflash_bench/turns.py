"""Children that take turns, so that drift of the machine hits all alike.

One that fails leaves the others as they are. Knows nothing of what is measured.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from dflash_bench.child import Child, state_of

GRACE_S = 10.0
"""For what an interrupted bench may still learn: long enough for a turn to end."""


def make_ready(
    children: Sequence[Child], *, say: Callable[[str], None], following: Child | None = None
) -> None:
    """Make all ready one after another; each starts and builds while the one before compiles.

    *following*, which may not use the device yet, starts behind the last and is loaded when this
    returns, so that nothing goes on while others take turns.
    """
    if children:
        children[0].start()
    for child, next_one in zip(children, [*children[1:], None], strict=True):
        if next_one is not None:
            next_one.start()
            next_one.build()
        elif following is not None:
            following.start()
        say(f"{child.name}: making ready")
        child.prepare()
        child.settle()
        say(f"{child.name}: {state_of(child)}")
    if following is not None:
        following.start()
        following.load()


def take_turns(
    children: Sequence[Child], *, enough: Callable[[int], bool], say: Callable[[str], None]
) -> int:
    """Let children that are ready take turns, A B B A ..., until *enough* says so; return how many.

    *enough* is asked after every round, with their number. Ends too when all have failed.
    """
    for number in count():
        if all(child.failure is not None for child in children) or enough(number):
            return number
        for child in children if number % 2 == 0 else reversed(children):
            child.turn()
        say(f"turn {number + 1}")
    raise AssertionError


def keep_what_is_known(children: Iterable[Child]) -> None:
    """Let children that were interrupted end what they are doing, and tell what they know.

    Takes ``GRACE_S`` at most.
    """
    until = time.monotonic() + GRACE_S
    asked = [child for child in children if child.can_tell]
    for child in asked:
        child.ask_so_far()
    for child in asked:
        child.take_so_far(until=until)
