"""The loop: prefill, then steps until the answer ends."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from dflash.decode.answer import Answer, Decoded, DecodeLimits, OnBlock
from dflash.decode.eager import EagerSteps, Session
from dflash.decode.replays import Replays
from dflash.drafter.model import Drafter

if TYPE_CHECKING:
    from dflash.target.model import Target


def speculative_decode(
    target: "Target",
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    limits: DecodeLimits,
    generator: torch.Generator | None = None,
    on_block: OnBlock | None = None,
    replays: Replays | None = None,
) -> Decoded:
    """Continue *prompt_ids* with the drafter's help; the output is the target's own.

    Args:
        target: the frozen target; its lock is held for the whole call.
        drafter: on the target's device; its weights may be fp32 or the target's dtype.
        prompt_ids: at least one token id of the target's vocabulary.
        limits: length, temperature and stop ids.
        generator: of the target's device; without one, sampling uses a fresh one of seed 0, so
            that decoding never moves the global random state.
        on_block: told of every committed block, the prefill's single token first.
        replays: captured steps of this target to use and add to; without, they serve this call.

    Raises:
        UsageError: an empty prompt, a token id outside the vocabulary, or a target whose cache
            cannot be rolled back.
    """
    session = Session(target, prompt_ids, limits=limits, generator=generator)
    return _decode(session, drafter, on_block=on_block, replays=replays or Replays(target))


def plain_decode(
    target: "Target",
    prompt_ids: Sequence[int],
    *,
    limits: DecodeLimits,
    generator: torch.Generator | None = None,
    on_token: Callable[[int], None] | None = None,
    replays: Replays | None = None,
) -> Decoded:
    """Continue *prompt_ids* with the target alone: the same loop, one token a step.

    Raises:
        UsageError: as ``speculative_decode``.
    """

    def on_block(tokens: list[int], _accepted: int) -> None:
        if on_token is not None:
            on_token(tokens[0])

    session = Session(target, prompt_ids, limits=limits, generator=generator)
    return _decode(session, None, on_block=on_block, replays=replays or Replays(target))


def _decode(
    session: Session, drafter: Drafter | None, *, on_block: OnBlock | None, replays: Replays
) -> Decoded:
    target = session.target
    with torch.no_grad(), target.lock:
        started = session.clock()
        choice_1 = session.choose(session.logits(session.prompt_P, rows=1))
        answer = Answer(session.limits, on_block)
        answer.commit(choice_1.tolist(), accepted=0)
        prompt_s = session.clock() - started

        accepted: list[int] = []
        load_s = decode_s = 0.0
        if answer.finished_by is None:
            ready = replays.ready(session, drafter, choice_1)
            loading = session.clock()
            steps = EagerSteps(session, drafter, choice_1) if ready is None else ready.load()
            prefilled = session.clock()
            while answer.finished_by is None:
                num_drafts, choices = steps.advance()
                accepted.append(num_drafts + 1)
                answer.commit(choices[: num_drafts + 1], accepted=num_drafts)
            load_s, decode_s = prefilled - loading, session.clock() - prefilled
    return Decoded(
        tokens=answer.tokens,
        accepted=accepted,
        prefill_s=prompt_s + load_s,
        decode_s=decode_s,
        finished_by=answer.finished_by,
        decode_loop=replays.decode_loop,
        eager_because=replays.eager_because,
    )
