"""What a run tells whoever called it."""

from dataclasses import dataclass
from pathlib import Path

from dflash.pipeline.waiting import Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. ``signal`` is the signal that stopped it before its end, if one did;
    ``tau`` is None where nothing was measured after its last step; ``last_tau`` is the last one
    measured, after step ``last_tau_step``."""

    step: int
    num_steps: int
    tau_before: float | None
    tau: float | None
    last_tau: float | None
    last_tau_step: int
    checkpoint: Path | None
    signal: int | None
    waits: Waits | None
    suggestion: str
    warm_up_s: float
