"""Which execution modes are safe here, which to choose, and the configuration's keys for it.

The rules are those of ``dflash train`` (``dflash.execution.choose_mode`` and its table of torch's
versions); what was found on this machine is laid over them.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import get_args

from dflash.diagnose.findings import Advice, Finding, ModeAdvice
from dflash.diagnose.machine import Machine
from dflash.errors import ConfigError
from dflash.execution import CAPTURING, Mode, choose_mode, is_known


def advise(
    findings: Sequence[Finding], machine: Machine, *, num_targets: int, num_drafters: int
) -> Advice:
    """Judge every execution mode for so many targets and drafters, each on a device of its own
    where there are enough of them."""
    targets, drafters = layout(machine.num_gpus, num_targets, num_drafters)
    modes = [_judged(mode, drafters, machine, findings=findings) for mode in get_args(Mode)]
    choice = choose_mode("auto", drafters, torch_version=machine.torch)
    safe = [each.mode for each in modes if each.safe == "yes"]
    ranked = [choice.mode, *choice.fallbacks, "eager"]
    chosen = next((mode for mode in ranked if mode in safe), None)
    if chosen is None:
        chosen, why = "eager", "nothing here is known to be safe, and eager captures nothing"
    elif chosen == choice.mode:
        why = choice.why
    else:
        why = f"the first of {', '.join(dict.fromkeys(ranked))} that is safe here"
    short = _shortage(machine.num_gpus, num_targets, num_drafters)
    return Advice(
        num_targets=num_targets,
        num_drafters=num_drafters,
        modes=modes,
        choose=chosen,
        why=f"{why}; {short}" if short else why,
        config=_config(targets, drafters, mode=chosen),
    )


def layout(num_gpus: int, num_targets: int, num_drafters: int) -> tuple[list[str], list[str]]:
    """Devices of the targets and of the drafters: targets first, then round again."""
    gpus = [f"cuda:{index}" for index in range(num_gpus)] or ["cpu"]
    places = list(islice(cycle(gpus), num_targets + num_drafters))
    return places[:num_targets], places[num_targets:]


def _shortage(num_gpus: int, num_targets: int, num_drafters: int) -> str:
    """That there is no device for each target and drafter, and what becomes of them, or ""."""
    if num_targets + num_drafters <= num_gpus:
        return ""
    has = f"here {'is' if num_gpus == 1 else 'are'} {_counted(num_gpus, 'CUDA GPU')}"
    asked = f"{_counted(num_targets, 'target')} and {_counted(num_drafters, 'drafter')}"
    those = "them" if num_gpus > 1 else "it"
    told = f"{has if num_gpus else 'here is only the CPU'} for {asked}, which share {those}"
    num_named = min(num_targets, max(num_gpus, 1))
    if num_named == num_targets:
        return told
    named = _counted(num_named, "device")
    return f"{told}; target.devices names {named}, since a device holds the frozen target once"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _judged(
    mode: Mode, drafters: Sequence[str], machine: Machine, *, findings: Sequence[Finding]
) -> ModeAdvice:
    try:
        choose_mode(mode, drafters, torch_version=machine.torch)
    except ConfigError as error:
        seen = [
            one.slug for one in findings if one.slug in error.what if one.verdict == "reproduced"
        ]
        why = f"{error.what}{'; reproduced here' if seen else ''}"
        return ModeAdvice(mode=mode, safe="cannot run" if "cpu" in drafters else "no", why=why)
    doubt = _doubt(machine, findings) if mode in CAPTURING else ""
    if doubt:
        return ModeAdvice(mode=mode, safe="not known", why=doubt)
    return ModeAdvice(
        mode=mode, safe="yes", why=f"nothing known of torch {machine.torch} forbids it"
    )


def _doubt(machine: Machine, findings: Sequence[Finding]) -> str:
    """What keeps a mode that captures from being called safe although no rule forbids it, or ""."""
    on_gpu = [finding for finding in findings if finding.device != "cpu"]
    failed = [finding.slug for finding in on_gpu if finding.remedy_verified == "no"]
    if failed:
        return f"the remedy failed here: {', '.join(failed)}"
    if not is_known(machine.torch):
        return f"torch {machine.torch} was never tried"
    return ""


def _config(targets: Sequence[str], drafters: Sequence[str], *, mode: str) -> str:
    def listed(devices: Sequence[str]) -> str:
        return "[" + ", ".join(f'"{device}"' for device in devices) + "]"

    targets = list(dict.fromkeys(targets))  # a device holds the frozen target once

    tables = (
        f"[target]\ndevices = {listed(targets)}",
        f"[drafter]\ndevices = {listed(drafters)}",
        f'[execution]\nmode = "{mode}"',
    )
    return "\n".join(tables)
