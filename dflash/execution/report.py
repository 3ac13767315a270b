"""What making a program ready came to."""

from dataclasses import asdict, dataclass, replace
from typing import Any

ADDED = ("warm_up_s", "num_compiled", "num_graphs", "num_skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Figures of one runner's warm-up; None where a mode has no such figure.

    Part of it may happen in the worker, as the installed torch wants: ``then`` joins the two.
    ``num_skipped`` compiled graphs were to be captured and are launched instead, as torch decided.
    ``launched_s`` and ``replayed_s`` are seconds of all rounds once, launched from Python and
    replayed from graphs. ``difference`` is the largest relative one between the probes of the two,
    0.0 when they are bit for bit the same; ``worker_difference`` the same for a replay by the
    worker's thread.
    """

    warm_up_s: float = 0.0
    num_compiled: int = 0
    num_graphs: int = 0
    num_skipped: int = 0
    launched_s: float | None = None
    replayed_s: float | None = None
    difference: float | None = None
    worker_difference: float | None = None

    def with_(self, **figures: Any) -> "WarmUp":  # noqa: ANN401 - any of the fields
        """The same with other *figures*."""
        return replace(self, **figures)

    def then(self, later: "WarmUp") -> "WarmUp":
        """This and *later* as one: seconds and counts add up, what else *later* knows stands."""
        ours, new = asdict(self), asdict(later)
        added = {name: ours[name] + new[name] for name in ADDED}
        known = {name: value for name, value in new.items() if value is not None}
        return replace(self, **(known | added))

    def as_record(self) -> dict[str, Any]:
        """What is known, by name, for a record."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {k: round(v, 6) if k.endswith("_s") else v for k, v in known.items()}
