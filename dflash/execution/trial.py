"""From a choice of mode to runners that are warm: what ``auto`` tries, and why it takes which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dflash.execution.faults import CaptureError, NumericsError
from dflash.execution.modes import ModeChoice
from dflash.execution.program import Program
from dflash.execution.runner import Runner

WORTH_IT = 1.02
"""Launching must be this much faster than replaying for a trial to prefer it: below that the two
are the same, and replaying leaves the host free."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Runners that are warm, one a program, all in the mode of *choice*."""

    runners: list[Runner]
    choice: ModeChoice


def make_ready(
    programs: Sequence[Program],
    choice: ModeChoice,
    *,
    streams: Sequence[torch.cuda.Stream | None],
    unsafe: bool = False,
    say: Callable[[str], None] = lambda _text: None,
) -> Ready:
    """Warm every program up, one after another, in the first mode of *choice* that works for all.

    Call it in the main thread, with inputs that are worth running on. Without fallbacks the first
    failure is raised. A mode that gave way leaves nothing behind, and *say* hears of it.

    Raises:
        CaptureError, NumericsError, torch.OutOfMemoryError: in the last mode there is.
    """
    while True:
        runners: list[Runner] = []
        try:
            for program, stream in zip(programs, streams, strict=True):
                runners.append(Runner(program, choice.mode, stream=stream, unsafe=unsafe))
                runners[-1].warm_up()
        except (CaptureError, NumericsError, torch.OutOfMemoryError) as error:
            _close(runners)
            if not choice.fallbacks:
                raise
            reason = str(error).splitlines()[0]
        else:
            slower = _slower_than_launching(runners) if choice.fallbacks else ""
            if not slower:
                return Ready(runners, _with_figures(choice, runners))
            _close(runners)
            reason = slower
        choice = choice.fall_back(reason)
        say(f"execution mode {choice.mode}: {choice.why}")


def _close(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _slower_than_launching(runners: Sequence[Runner]) -> str:
    """Why replaying is not worth it, or "" when it is."""
    launched_s, replayed_s = _times(runners)
    if not launched_s or not replayed_s or replayed_s <= launched_s * WORTH_IT:
        return ""
    return (
        f"replaying all rounds took {replayed_s * 1e3:.1f} ms, launching them"
        f" {launched_s * 1e3:.1f} ms"
    )


def _with_figures(choice: ModeChoice, runners: Sequence[Runner]) -> ModeChoice:
    launched_s, replayed_s = _times(runners)
    if not choice.fallbacks or not launched_s or not replayed_s:
        return choice
    why = (
        f"{choice.why}; in a trial replaying all rounds took {replayed_s * 1e3:.1f} ms, launching"
        f" them {launched_s * 1e3:.1f} ms"
    )
    return replace(choice, why=why)


def _times(runners: Sequence[Runner]) -> tuple[float, float]:
    launched = [runner.report.launched_s or 0.0 for runner in runners]
    replayed = [runner.report.replayed_s or 0.0 for runner in runners]
    return max(launched, default=0.0), max(replayed, default=0.0)
