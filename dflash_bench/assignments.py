"""Which shapes a ``--set`` is for: a shape file's and a configuration's keys differ; no torch."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.config.load import FIELDS
from dflash.errors import UsageError
from dflash_bench.shape_files import SHAPE_KEYS, key_of


@dataclass(frozen=True, slots=True)
class Assignments:
    """What is changed of shape files, and of configurations; in the order in which it was given."""

    of_shapes: tuple[str, ...]
    of_configs: tuple[str, ...]


def shared_out(items: Sequence[str], *, shapes: bool, configs: bool) -> Assignments:
    """Give each of *items* to whatever knows its key.

    Where there is only one kind, it is given everything, and says itself what it does not know.

    Args:
        items: ``token_budget=8192``.
        shapes, configs: whether there are any of the kind.

    Raises:
        UsageError: neither kind knows a key; suggests the nearest.
    """
    if not (shapes and configs):
        return Assignments(tuple(items) if shapes else (), tuple(items) if configs else ())
    known = {*SHAPE_KEYS, *FIELDS}
    for item in items:
        key = key_of(item)
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
            raise UsageError(
                f"--set {item}: neither a shape nor a configuration has {key}",
                hint=f"did you mean {near[0]}?" if near else f"a shape has {', '.join(SHAPE_KEYS)}",
            )
    return Assignments(
        tuple(item for item in items if key_of(item) in SHAPE_KEYS),
        tuple(item for item in items if key_of(item) in FIELDS),
    )
