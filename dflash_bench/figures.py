"""The figures of a row by their names: what ``--expect`` and ``--fail-if`` can speak of."""

from collections.abc import Callable
from dataclasses import dataclass

from dflash.measurement import Estimate, Row


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a row.

    Attributes:
        read: from a row; None where it has none.
        read_once: it moves from run to run, and one run does not know by how much.
        higher_is_better: lower is, otherwise.
        moved_by_compiling: compiling a graph and reading it from the cache leave different ones.
    """

    read: Callable[[Row], float | None]
    read_once: bool = False
    higher_is_better: bool = False
    moved_by_compiling: bool = False


def _of(
    part: str, name: str, *, read_once: bool = False, moved_by_compiling: bool = False
) -> Figure:
    def read(row: Row) -> float | None:
        found = getattr(row, part)
        value = None if found is None else getattr(found, name)
        return None if value is None else float(value)

    return Figure(read, read_once, moved_by_compiling=moved_by_compiling)


def _own(name: str, *, read_once: bool = False, higher_is_better: bool = False) -> Figure:
    def read(row: Row) -> float | None:
        value = getattr(row, name)
        return value.value if isinstance(value, Estimate) else value

    return Figure(read, read_once, higher_is_better)


def _loss_against_eager(row: Row) -> float | None:
    """Its size: a loss that is too low is as wrong as one that is too high."""
    return None if row.loss_against_eager is None else abs(row.loss_against_eager)


FIGURES: dict[str, Figure] = {
    "step_ms": _of("step_ms", "median"),
    "step_p90_ms": _of("step_ms", "p90", read_once=True),
    "step_max_ms": _of("step_ms", "max", read_once=True),
    "per_s": _own("per_s", higher_is_better=True),
    "model_tflops": _own("model_tflops", read_once=True, higher_is_better=True),
    "matrix_share": _own("matrix_share", read_once=True, higher_is_better=True),
    "loss_against_eager": Figure(_loss_against_eager),
    "rss_gib": _of("memory", "rss_gib", read_once=True),
    **{
        name: _of("start_up", name, read_once=True)
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
        name: _of("memory", name, moved_by_compiling=True)
        for name in ("peak_allocated_gib", "peak_reserved_gib", "graph_pools_gib", "process_gib")
    },
    **{name: _of("memory", name) for name in ("device_allocs", "alloc_retries")},
    **{
        name: _of("graphs", name) for name in ("recompiles", "captured", "captured_late", "skipped")
    },
}
