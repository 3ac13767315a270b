"""The learning curve of a run: loss, and accepted length in training beside tau by decoding."""

from collections.abc import Iterable
from pathlib import Path

from dflash.records import EvalRecord, EventRecord, StepRecord, read_records
from dflash.report.svg import Panel, Series, figure

STEPS_LABEL = "optimizer steps"


def learning_curve(
    records: Iterable[StepRecord | EvalRecord | EventRecord], *, title: str = "Learning curve"
) -> str:
    """One SVG document. Parts that no record has are said to be missing, not drawn as zero."""
    records = list(records)
    steps = [record for record in records if isinstance(record, StepRecord)]
    evals = [record for record in records if isinstance(record, EvalRecord)]
    accepted = [
        (record.step, record.accepted_tokens_per_block)
        for record in steps
        if record.accepted_tokens_per_block is not None
    ]
    loss = Series("training loss", [(record.step, record.loss) for record in steps])
    lengths = [
        Series("tau, decoding held-out prompts", [(e.step, e.tau) for e in evals], marked=True),
        Series("accepted tokens per block, in training", accepted),
    ]
    panels = [
        Panel(STEPS_LABEL, "loss (nat)", [loss]),
        Panel(STEPS_LABEL, "tokens", [each for each in lengths if each.points], floor=1.0),
    ]
    return figure(title, panels)


def write_learning_curve(run_dir: Path, out: Path, *, title: str = "Learning curve") -> None:
    """Draw the records of *run_dir* into the file *out*."""
    text = learning_curve(read_records(run_dir / "records.jsonl"), title=title)
    beside = out.with_name(f"{out.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(out)
