"""Records as words: one line each, and the figures of a step with their names."""

import datetime as dt
from collections.abc import Mapping

from dflash.records import EvalRecord, EventRecord, StepRecord

ROUNDED_FROM = 1000.0
"""Numbers from here on are shown without a fraction."""


def record_line(
    record: StepRecord | EvalRecord | EventRecord, *, total_steps: int | None = None
) -> str:
    """``step 40/400 | loss 3.21 | accepted 1.84 | ..``."""
    if isinstance(record, EventRecord):
        detail = ", ".join(f"{name}={in_words(value)}" for name, value in record.detail.items())
        return f"step {record.step} | {record.name}{': ' if detail else ''}{detail}"
    if isinstance(record, EvalRecord):
        return f"step {record.step} | {eval_text(record)}"
    total = "" if total_steps is None else f"/{total_steps}"
    figures = " | ".join(f"{name} {value}" for name, value in step_figures(record))
    return f"step {record.step}{total} | {figures}"


def in_words(value: object) -> str:
    """A value of an event's detail as one writes it by hand: no braces, no quotes."""
    if isinstance(value, Mapping):
        parts = [f"{name} {in_words(inner)}" for name, inner in value.items()]
        return f"({', '.join(parts)})"
    if isinstance(value, list | tuple):
        return ", ".join(in_words(inner) for inner in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= ROUNDED_FROM else f"{value:.4g}"
    return str(value)


def eval_text(record: EvalRecord) -> str:
    text = (
        f"tau {record.tau:.2f} over {record.num_prompts} prompts |"
        f" {record.tokens_per_s_drafter:,.0f} tok/s with the drafter"
    )
    if record.tokens_per_s_plain is None or record.speedup is None:
        return text
    return f"{text}, {record.tokens_per_s_plain:,.0f} without: {record.speedup:.2f}x"


def step_figures(record: StepRecord) -> list[tuple[str, str]]:
    """Name and value, with the unit, of everything a step shows; what it lacks is left out."""
    figures = [("loss", f"{record.loss:.4f}")]
    if record.accepted_tokens_per_block is not None:
        figures.append(("accepted", f"{record.accepted_tokens_per_block:.2f}"))
    figures += [
        ("lr", f"{record.lr:.2e}"),
        ("norm", f"{record.grad_norm:.2f}"),
        ("tok/s", f"{record.tokens_per_s:,.0f}"),
        ("padding", f"{record.padding_share:.1%}"),
        ("wait", waiting(record)),
        ("memory", memory(record)),
    ]
    return figures


def waiting(record: StepRecord) -> str:
    """Share of a step in which each party had nothing to do."""
    parts = (
        ("data", record.wait_data_s),
        ("target", record.wait_target_s),
        ("drafter", record.wait_drafter_s),
    )
    if record.step_s <= 0:
        return ", ".join(f"{name} {wait_s:.2f} s" for name, wait_s in parts)
    return ", ".join(f"{name} {wait_s / record.step_s:.0%}" for name, wait_s in parts)


def memory(record: StepRecord) -> str:
    devices = [f"{device} {gib:.1f} GiB" for device, gib in sorted(record.allocated_gib.items())]
    return ", ".join([*devices, f"process {record.rss_gib:.1f} GiB"])


def time_left(left_s: float | None) -> str:
    return "" if left_s is None else f" | left {dt.timedelta(seconds=round(left_s))}"
