"""What a drafter is worth: the accepted length and the speed of really decoding with it.

tau is the macro mean of the published benchmark: for every prompt the mean of m + 1 over its
verify steps, then the mean of those over the prompts. A prompt whose answer ends with the token
that the prefill gives has no verify step and takes no part in it. Nothing here is estimated from
the training loss, and nothing here moves the random state or the mode of what is being trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from dflash.decode import (
    Decoded,
    DecodeLimits,
    DecodeLoop,
    Replays,
    plain_decode,
    speculative_decode,
)
from dflash.drafter.model import Drafter
from dflash.errors import DataError
from dflash.records import EvalRecord
from dflash.train.stored import drafter_of

if TYPE_CHECKING:
    from dflash.target.model import Target

OnPrompt = Callable[[int, Decoded, Decoded | None], None]
"""Called with the number of a prompt and what was decoded for it with the drafter and, if it was,
without."""

WARM_UP_TOKENS = 8
"""Decoded once, untimed, before a comparison of speeds: kernels load, memory pools fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """How to decode. ``num_plain_prompts`` are also decoded without the drafter, for the speed."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    num_plain_prompts: int = 0

    @property
    def limits(self) -> DecodeLimits:
        return DecodeLimits(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_ids=self.stop_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured; lists that count verify steps are over all prompts together.

    ``steps_by_accepted_tokens[j]`` is the number of verify steps that committed j + 1 tokens;
    ``accepted_per_position[k - 1]`` the share of verify steps that accepted slot k (so all slots
    before it too). Speeds count the tokens after the prefill over the seconds after the prefill;
    ``speedup`` compares only prompts that were decoded both ways. ``decode_loop`` is "captured"
    if every prompt was decoded by replays, both ways; ``eager_because`` says why not.
    """

    tau: float
    tau_per_prompt: list[float | None]
    num_prompts: int
    num_verify_steps: int
    num_new_tokens: int
    steps_by_accepted_tokens: list[int]
    accepted_per_position: list[float]
    tokens_per_s_drafter: float
    prefill_s: float
    decode_s: float
    tokens_per_s_plain: float | None
    speedup: float | None
    decode_loop: DecodeLoop
    eager_because: str | None

    def record(self, *, step: int, settings: EvalSettings) -> EvalRecord:
        """What the run folder keeps of it."""
        return EvalRecord(
            step=step,
            tau=self.tau,
            tau_per_prompt=self.tau_per_prompt,
            accepted_per_position=self.accepted_per_position,
            steps_by_accepted_tokens=self.steps_by_accepted_tokens,
            tokens_per_s_drafter=self.tokens_per_s_drafter,
            tokens_per_s_plain=self.tokens_per_s_plain,
            speedup=self.speedup,
            num_prompts=self.num_prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            decode_loop=self.decode_loop,
            eager_because=self.eager_because,
        )


class Rig:
    """What one evaluation leaves for the next: captured steps, and the copy that they draft with.

    Graphs read weights where they were when captured, so a copy stays and gets the new weights.
    """

    def __init__(self, target: "Target") -> None:
        self.target = target
        self.replays = Replays(target)
        self._copy: Drafter | None = None

    @contextmanager
    def drafter(self, drafter: Drafter) -> Iterator[Drafter]:
        """Yield what ``decoding_copy`` does."""
        with decoding_copy(drafter, self.target, into=self._copy) as copy:
            yield copy
        kept = copy is not drafter and self.replays.decode_loop == "captured"
        self._copy = copy if kept else None

    @property
    def num_bytes(self) -> int:
        """What is held between evaluations."""
        copied = () if self._copy is None else self._copy.parameters()
        return self.replays.num_bytes + sum(weight.nbytes for weight in copied)


def evaluate(
    target: "Target",
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    settings: EvalSettings,
    heartbeat: Callable[[], None] | None = None,
    on_prompt: OnPrompt | None = None,
    rig: Rig | None = None,
) -> Evaluation:
    """Decode every prompt with the drafter, and the first few also without it.

    Args:
        target: the frozen target; its lock is held for one prompt at a time.
        drafter: the one in training or another; where its device or dtype is not the target's
            compute dtype, a copy of it decodes and is freed afterwards.
        prompts: token ids, at least one each.
        settings: limits, temperature, seed, how many prompts also run without the drafter.
        heartbeat: called at every verify step, so that a watchdog sees that work goes on.
        on_prompt: called after every prompt.
        rig: of this target, where more evaluations follow.

    Raises:
        DataError: no prompts, or no prompt has a verify step.
        UsageError: a prompt or a target that cannot be decoded.
    """
    if not prompts:
        raise DataError("there are no prompts to evaluate on")

    def beat(*_: object) -> None:
        if heartbeat is not None:
            heartbeat()

    limits = settings.limits
    drafted: list[Decoded] = []
    plain: list[Decoded] = []
    rig = rig or Rig(target)
    with rig.drafter(drafter) as copy:
        if settings.num_plain_prompts:
            _warm_up(target, copy, prompts[0], replays=rig.replays)
        same: dict[str, Any] = {"limits": limits, "replays": rig.replays}
        for number, prompt in enumerate(prompts):
            sampler = partial(_generator, target, settings.seed + number)
            drafted.append(
                speculative_decode(target, copy, prompt, generator=sampler(), on_block=beat, **same)
            )
            if number < settings.num_plain_prompts:
                plain.append(
                    plain_decode(target, prompt, generator=sampler(), on_token=beat, **same)
                )
            if on_prompt is not None:
                on_prompt(number, drafted[-1], plain[number] if number < len(plain) else None)
    return summarise(drafted, plain, block_size=drafter.shape.block_size)


def summarise(
    drafted: Sequence[Decoded], plain: Sequence[Decoded], *, block_size: int
) -> Evaluation:
    """Turn decoded prompts into figures; *plain* are the first of *drafted* without a drafter.

    Raises:
        DataError: no prompt has a verify step.
    """
    tau_per_prompt = [one.tau for one in drafted]
    measured = [tau for tau in tau_per_prompt if tau is not None]
    if not measured:
        raise DataError(
            f"none of the {len(drafted)} prompts has a verify step: the target ends every answer "
            "with its first token",
            hint="give other prompts, or more than one new token",
        )
    accepted = [tokens for one in drafted for tokens in one.accepted]
    steps = [accepted.count(tokens) for tokens in range(1, block_size + 1)]
    at_least = list(accumulate(reversed(steps)))[::-1]  # steps that committed >= 1, 2, ... tokens
    both = drafted[: len(plain)]
    eager = [one for one in (*drafted, *plain) if one.decode_loop == "eager"]
    return Evaluation(
        tau=sum(measured) / len(measured),
        tau_per_prompt=tau_per_prompt,
        num_prompts=len(drafted),
        num_verify_steps=len(accepted),
        num_new_tokens=sum(len(one.tokens) for one in drafted),
        steps_by_accepted_tokens=steps,
        accepted_per_position=[count / len(accepted) for count in at_least[1:]],
        tokens_per_s_drafter=_tokens_per_s(drafted) or 0.0,
        prefill_s=sum(one.prefill_s for one in drafted),
        decode_s=sum(one.decode_s for one in drafted),
        tokens_per_s_plain=_tokens_per_s(plain),
        speedup=_ratio(_tokens_per_s(both), _tokens_per_s(plain)),
        decode_loop="eager" if eager else "captured",
        eager_because=eager[0].eager_because if eager else None,
    )


@contextmanager
def decoding_copy(
    drafter: Drafter, target: "Target", *, into: Drafter | None = None
) -> Iterator[Drafter]:
    """Yield *drafter* in eval mode on the target's device in its compute dtype.

    That is the drafter itself where it already is so (its mode is put back), else a copy: *into*,
    an earlier one, with the new weights, or a new one.
    """
    dtype = torch.bfloat16 if target.dtype == torch.float16 else target.dtype
    device = torch.device(target.device)
    own = next(drafter.parameters())
    if own.device == device and own.dtype == dtype:
        modes = {module: module.training for module in drafter.modules()}
        try:
            yield drafter.eval()
        finally:
            for module, training in modes.items():
                module.training = training
    elif into is not None:
        into.load_state_dict(drafter.state_dict())
        yield into
    else:
        yield drafter_of(drafter.shape, drafter.state_dict(), device=device, dtype=dtype)


def _generator(target: "Target", seed: int) -> torch.Generator:
    return torch.Generator(torch.device(target.device)).manual_seed(seed)


def _warm_up(
    target: "Target", drafter: Drafter, prompt: Sequence[int], *, replays: Replays
) -> None:
    limits = DecodeLimits(max_new_tokens=WARM_UP_TOKENS)
    speculative_decode(target, drafter, prompt, limits=limits, replays=replays)
    plain_decode(target, prompt, limits=limits, replays=replays)


def _tokens_per_s(decoded: Sequence[Decoded]) -> float | None:
    seconds = sum(one.decode_s for one in decoded)
    return sum(one.num_decoded for one in decoded) / seconds if seconds else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
