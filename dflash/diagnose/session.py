"""One call of ``dflash diagnose``: several failure modes, and the advice."""

import time
from collections.abc import Callable, Sequence

from dflash.diagnose.examine import Plan, address_of, examine
from dflash.diagnose.findings import Diagnosis, Launch
from dflash.diagnose.launch import Order, run_orders
from dflash.diagnose.machine import Machine
from dflash.diagnose.user_step import RETURNS, require_spelling, wrong_step
from dflash.errors import UsageError
from dflash.failures import FailureMode, all_modes

OWN_LIMIT_S = 300.0  # of a user's step on its own, which may compile


def diagnose(
    modes: Sequence[FailureMode],
    machine: Machine,
    *,
    plan: Plan,
    counts: tuple[int, int] | None = None,
    watch: Callable[[str, Launch], None] = lambda _slug, _launch: None,
) -> Diagnosis:
    """Examine *modes*; with *counts* (targets, drafters) say which execution modes are safe.

    An interrupt ends it with the modes that are done; there is no advice then.

    Raises:
        UsageError: the user's step fails on its own, or a mode takes none.
    """
    begun_s = time.monotonic()
    if plan.step:
        _check_step(modes, plan)
    findings = examine(modes, machine, plan=plan, watch=watch)
    complete, advice = len(findings) == len(modes), None
    if counts is not None and complete:
        from dflash.diagnose.matrix import advise

        num_targets, num_drafters = counts
        advice = advise(findings, machine, num_targets=num_targets, num_drafters=num_drafters)
    return Diagnosis(
        torch=machine.torch,
        level=plan.level,
        environment=machine.environment,
        findings=findings,
        advice=advice,
        complete=complete,
        missing=[mode.slug for mode in modes[len(findings) :]],
        wall_s=round(time.monotonic() - begun_s, 3),
    )


def _check_step(modes: Sequence[FailureMode], plan: Plan) -> None:
    """Refuse a step that does not work where nothing is wrong around it."""
    without = [mode.slug for mode in modes if mode.reproduce_step is None]
    if without:
        able = ", ".join(mode.slug for mode in all_modes() if mode.reproduce_step) or "none"
        raise UsageError(
            f"--step cannot stand in for the program of {', '.join(without)}",
            hint=f"failure modes that take a step of yours: {able}",
        )
    require_spelling(plan.step)
    limit_s = plan.time_limit_s or OWN_LIMIT_S
    order = Order(
        address=address_of(modes[0]),
        variant="own",
        step=plan.step,
        time_limit_s=limit_s,
        hang_s=OWN_LIMIT_S,
    )
    (own,) = run_orders([order])
    if own.end == "killed" and own.wall_s >= limit_s:
        raise UsageError(
            f"{plan.step} alone, with no failure mode around it, takes more than --timeout"
            f" {limit_s:g}",
            hint=f"without --timeout it has {OWN_LIMIT_S:g} s to come to its end",
        )
    if own.end == "number":
        return
    wrong = wrong_step(own.message)
    if wrong is not None:
        raise wrong
    told = "\n" + (own.traceback or own.stacks or own.stderr_tail).rstrip()
    raise UsageError(
        f"{plan.step} fails on its own, with no failure mode around it: {own.end}:"
        f" {own.message}{'' if told.strip() == own.message else told}",
        hint=f"mend it first; {RETURNS}",
    )
