"""Whether training counts accepted tokens of which decoding sees nothing: taught something else.

A drafter that has only learnt its training texts by heart looks the same from outside. Hence the
evidence asked for here, and the words of the last line.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from dflash.diagnose.bounds import rate
from dflash.diagnose.findings import Rate
from dflash.diagnose.finished import AnyRecord, FinishedRun
from dflash.records import EvalRecord, StepRecord

MUCH_ACCEPTED = 2.0
"""Tokens per block by training's count; 1 is the target's own."""

NOTHING_ACCEPTED = 0.05
"""Share of verify steps that accept a draft, up to which it counts as none: an untrained drafter
guesses a frequent token now and then. It is held against the exact 95 % bounds of the share, not
against the share: 0 of 58 steps, or 3 of 152, may still be more than this, 0 of 59 are not."""

MIN_PROMPTS = 8
"""Verify steps of one prompt resemble each other, so that the bounds need prompts besides: where
fewer than one prompt of three is of a kind that the drafter knows, eight show one (96 %)."""

MIN_COUNTS = 3
"""Records of training, of which even the least must count much: a record's count may be that of one
batch, of a few dozen blocks."""


def accepted_in_training_alone(run: FinishedRun) -> Iterator[str]:
    """What shows it, if all of this holds: the last counts of training are high, the last
    evaluation accepted nothing, and none before it accepted something, since labels and masks are
    the same throughout a run."""
    if not run.evals or any(_accepting(record).at_least > NOTHING_ACCEPTED for record in run.evals):
        return
    last = run.evals[-1]
    counting = _counting(run.records, before=last)[-MIN_COUNTS:]
    decoded = _accepting(last)
    num_prompts = sum(tau is not None for tau in last.tau_per_prompt)
    counts = [record.accepted_tokens_per_block or 0.0 for record in counting]
    if len(counts) < MIN_COUNTS or min(counts) <= MUCH_ACCEPTED:
        return
    if num_prompts < MIN_PROMPTS or decoded.at_most > NOTHING_ACCEPTED:
        return
    yield (
        f"step {last.step}: training counts {min(counts):.2f} accepted tokens per block or more,"
        f" decoding {num_prompts} held-out prompts accepts in {decoded.shown} of"
        f" {decoded.launches} verify steps (tau {last.tau:.2f}, 95 %: at most"
        f" {decoded.at_most:.1%} of steps)"
    )
    yield _overfitting(counting[-1])


def _overfitting(last: StepRecord) -> str:
    """The other explanation, and how to tell."""
    if last.epoch <= 1.0:
        return (
            f"overfitting does not explain it, unless the texts repeat themselves: training was in"
            f" its first pass over them ({last.epoch:.2f})"
        )
    return (
        f"or it is overfitting: {last.epoch:.1f} passes over {last.tokens / last.epoch:.0f} tokens;"
        " what is known by heart is accepted nowhere else. dflash eval --prompts with training"
        " texts tells: overfitted, tau is high there"
    )


def _accepting(record: EvalRecord) -> Rate:
    """Verify steps that accepted a draft, of all."""
    steps = record.steps_by_accepted_tokens
    return rate(sum(steps[1:]), sum(steps))


def _counting(records: Sequence[AnyRecord], *, before: EvalRecord) -> list[StepRecord]:
    earlier = takewhile(lambda record: record is not before, records)
    steps = (record for record in earlier if isinstance(record, StepRecord))
    return [step for step in steps if step.accepted_tokens_per_block is not None]
