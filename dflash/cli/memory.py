"""What ``dflash train --dry-run`` prints, with and without ``--plan``."""

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from dflash.cli.output import print_json, print_table
from dflash.errors import DeviceMemoryError

GIB = float(2**30)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.config import RunConfig
    from dflash.train.forecast import Forecast
    from dflash.train.memory import DevicePlan


def print_rehearsal(config: "RunConfig", *, as_json: bool) -> None:
    """Load all, run one step, and print the plan beside what was measured."""
    from dflash.train.rehearsal import rehearse

    seen = rehearse(config)
    if as_json:
        print_json(asdict(seen))
        return
    print(
        f"one step: loss {seen.loss:.3f}, {seen.step_s:.3f} s after {seen.warm_up_s:.1f} s of"
        f" warm-up; mode {seen.mode}, {seen.mode_why}"
    )
    print(
        f"{seen.num_steps} steps over {seen.num_documents} documents, packed to"
        f" {seen.fill:.1%}; {seen.num_parameters:,} parameters, {seen.num_anchors} anchors a batch"
    )
    for plan in seen.plans:
        rows = [*_rows(plan), (_gib(plan.measured_bytes or 0), "measured peak")]
        if plan.reserved_bytes is not None:
            rows.append((_gib(plan.reserved_bytes), "measured peak, with gaps"))
        print_table(("GiB", plan.device), rows)


def print_forecast(config: "RunConfig", *, device_gib: float | None, as_json: bool) -> None:
    """Print the plan alone, against the memory of the devices.

    Raises:
        DeviceMemoryError: a device cannot hold it.
    """
    from dflash.train.forecast import forecast

    seen = forecast(config, device_gib=device_gib)
    judged = {fit.plan.device: fit for fit in seen.fits}
    if as_json:
        print_json(_as_json(seen))
    else:
        print(
            f"{seen.num_parameters:,} parameters, {seen.num_anchors} anchors a batch; memory:"
            f" {seen.memory}"
        )
        for names, plan in _alike(seen.plans):
            fit = judged.get(plan.device)
            of = f", of {_gib(fit.available_bytes)}: {fit.state}" if fit else ""
            print_table(("GiB", names), _rows(plan, of=of))
        if seen.advice and not seen.too_large:
            print(f"what would make room: {seen.advice}")
    if seen.too_large:
        what = "; ".join(str(fit) for fit in seen.too_large)
        raise DeviceMemoryError(f"the run cannot fit: {what}", hint=seen.advice)


def _as_json(seen: "Forecast") -> dict[str, object]:
    judged = {fit.plan.device: fit for fit in seen.fits}
    devices = []
    for plan in seen.plans:
        fit = judged.get(plan.device)
        devices.append(
            {
                "device": plan.device,
                "items": plan.items,
                "predicted_bytes": plan.predicted_bytes,
                "available_bytes": fit.available_bytes if fit else None,
                "state": fit.state if fit else None,
            }
        )
    return {
        "devices": devices,
        "memory": seen.memory,
        "advice": seen.advice,
        "num_parameters": seen.num_parameters,
        "num_anchors": seen.num_anchors,
    }


def _rows(plan: "DevicePlan", *, of: str = "") -> list[tuple[str, str]]:
    rows = [(_gib(size), name) for name, size in plan.items.items() if size]
    return [*rows, (_gib(plan.predicted_bytes), f"predicted peak{of}")]


def _alike(plans: "Sequence[DevicePlan]") -> list[tuple[str, "DevicePlan"]]:
    """Names of devices that hold the same, joined, and the plan of one of them."""
    groups = [list(group) for _, group in groupby(plans, key=lambda plan: plan.items)]
    return [
        (", ".join(plan.device for plan in group) + (" each" if len(group) > 1 else ""), group[0])
        for group in groups
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"
