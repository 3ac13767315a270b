"""The figures of a row by their names: what ``--expect`` and ``--fail-if`` can speak of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dflash.measurement import Estimate, Row

Kind = Literal["steps", "rate", "count", "once"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row.

    Attributes:
        read: from a row; None where it has none.
        kind: over all timed steps ("steps"), an estimate with its interval ("rate"), repeatable to
            the precision of its digits ("count"), or a time that was read once ("once").
        higher_is_better: lower is, otherwise.
    """

    read: Callable[[Row], float | None]
    kind: Kind
    higher_is_better: bool = False


def _of(part: str, name: str, kind: Kind) -> Figure:
    def read(row: Row) -> float | None:
        found = getattr(row, part)
        value = None if found is None else getattr(found, name)
        return None if value is None else float(value)

    return Figure(read, kind)


def _own(name: str, kind: Kind, *, higher_is_better: bool = False) -> Figure:
    def read(row: Row) -> float | None:
        value = getattr(row, name)
        return value.value if isinstance(value, Estimate) else value

    return Figure(read, kind, higher_is_better)


FIGURES: dict[str, Figure] = {
    "step_ms": _of("step_ms", "median", "steps"),
    "step_p90_ms": _of("step_ms", "p90", "once"),
    "step_max_ms": _of("step_ms", "max", "once"),
    "per_s": _own("per_s", "rate", higher_is_better=True),
    "model_tflops": _own("model_tflops", "once", higher_is_better=True),
    "matrix_share": _own("matrix_share", "once", higher_is_better=True),
    "loss_against_eager": _own("loss_against_eager", "count"),
    "rss_gib": _of("memory", "rss_gib", "once"),
    **{
        name: _of("start_up", name, "once")
        for name in (
            "first_step_s",
            "build_s",
            "warm_up_s",
            "compile_s",
            "capture_s",
            "pays_back_after_steps",
        )
    },
    **{
        name: _of("memory", name, "count")
        for name in (
            "peak_allocated_gib",
            "peak_reserved_gib",
            "graph_pools_gib",
            "process_gib",
            "device_allocs",
            "alloc_retries",
        )
    },
    **{
        name: _of("graphs", name, "count")
        for name in ("recompiles", "captured", "captured_late", "skipped")
    },
}
