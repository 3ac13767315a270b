"""Speculative decoding: the drafter proposes a block, the target verifies it in one forward.

Lossless by construction: every token that is committed was chosen by the target itself, greedily
or by sampling, given the tokens before it; the drafter only decides how many of these choices one
target forward yields. In fp32 the greedy output equals the target's own, token for token; in bf16
the verifying forward has another shape than a one-token forward, so a near-tie may flip.

``plain_decode`` is the same loop with a block of one token, so that the two can be compared.

Letters as in dflash.drafter: B slots of a block, P prompt tokens, D hidden, C features, V words.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name torch itself uses)

from dflash.drafter.model import ContextCache, Drafter
from dflash.errors import UsageError
from dflash.target.sharing import decoder_layers

if TYPE_CHECKING:
    from dflash.target.model import Target

OnBlock = Callable[[list[int], int], None]
"""Called with the tokens just committed and how many of them were accepted drafts."""

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in the published decoder (z-lab ``dflash/model.py``)."""

ROLLS_BACK = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types that keep one key and value a token, so that rejected tokens can be forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """When to stop, and how the target chooses: temperature 0 is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 or a positive number, got {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One decoded prompt.

    ``tokens`` are the generated ones only, cut after the first stop id. ``accepted`` holds m + 1
    for every verify step: m accepted drafts and the target's own next token; the last step counts
    in full even where its tokens were cut. ``prefill_s`` covers the prompt in the target and in
    the drafter's context cache; ``decode_s`` everything after it.
    """

    tokens: list[int]
    accepted: list[int]
    prefill_s: float
    decode_s: float
    finished_by: Literal["stop", "length"]

    @property
    def tau(self) -> float | None:
        """Mean tokens committed per verify step; None if the prefill already ended the answer."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def num_decoded(self) -> int:
        """Tokens that ``decode_s`` paid for: all but the first, which the prefill gives."""
        return len(self.tokens) - 1


def speculative_decode(
    target: "Target",
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    limits: DecodeLimits,
    generator: torch.Generator | None = None,
    on_block: OnBlock | None = None,
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

    Raises:
        UsageError: an empty prompt, a token id outside the vocabulary, or a target whose cache
            cannot be rolled back.
    """
    shape = drafter.shape
    capacity = len(prompt_ids) + limits.max_new_tokens + shape.block_size
    session = _Session(target, prompt_ids, limits=limits, generator=generator)
    with torch.no_grad(), target.lock, _captured(target, session.outputs):
        return _decode(session, _Proposer(session, drafter, capacity), on_block)


def plain_decode(
    target: "Target",
    prompt_ids: Sequence[int],
    *,
    limits: DecodeLimits,
    generator: torch.Generator | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Decoded:
    """Continue *prompt_ids* with the target alone: the same loop, one token a step.

    Raises:
        UsageError: as ``speculative_decode``.
    """

    def on_block(tokens: list[int], _accepted: int) -> None:
        if on_token is not None:
            on_token(tokens[0])

    session = _Session(target, prompt_ids, limits=limits, generator=generator)
    with torch.no_grad(), target.lock:
        return _decode(session, None, on_block)


def _decode(session: "_Session", proposer: "_Proposer | None", on_block: OnBlock | None) -> Decoded:
    started = session.clock()
    choice_1 = session.verify(session.prompt_P, rows=1)
    if proposer is not None:
        proposer.extend(session.features(len(session.prompt_P)))
    answer = _Answer(session.limits, on_block)
    answer.commit(choice_1.tolist(), accepted=0)
    prefilled = session.clock()

    accepted: list[int] = []
    while answer.finished_by is None:
        block_B = choice_1 if proposer is None else proposer.block(choice_1)
        choice_B = session.verify(block_B)
        agree_B = (block_B[1:] == choice_B[:-1]).cumprod(0).sum().view(1)
        num_drafts, *choices = torch.cat([agree_B, choice_B]).tolist()  # the step's one host sync
        session.forget(len(choices) - num_drafts - 1)
        accepted.append(num_drafts + 1)
        answer.commit(choices[: num_drafts + 1], accepted=num_drafts)
        choice_1 = choice_B[num_drafts : num_drafts + 1]
        if proposer is not None and answer.finished_by is None:
            proposer.extend(session.features(num_drafts + 1))
    return Decoded(
        tokens=answer.tokens,
        accepted=accepted,
        prefill_s=prefilled - started,
        decode_s=session.clock() - prefilled,
        finished_by=answer.finished_by,
    )


class _Answer:
    """The tokens generated so far, and whether they end here."""

    def __init__(self, limits: DecodeLimits, on_block: OnBlock | None) -> None:
        self.tokens: list[int] = []
        self.finished_by: Literal["stop", "length"] | None = None
        self._limits = limits
        self._on_block = on_block

    def commit(self, tokens: list[int], *, accepted: int) -> None:
        kept = tokens[: self._limits.max_new_tokens - len(self.tokens)]
        stop = next((i for i, token in enumerate(kept) if token in self._limits.stop_ids), None)
        if stop is not None:
            kept = kept[: stop + 1]
            self.finished_by = "stop"
        self.tokens += kept
        if stop is None and len(self.tokens) == self._limits.max_new_tokens:
            self.finished_by = "length"
        if self._on_block is not None:
            self._on_block(kept, min(accepted, len(kept)))


class _Session:
    """The target's side of one prompt: its cache, its taps, its choice of the next token."""

    def __init__(
        self,
        target: "Target",
        prompt_ids: Sequence[int],
        *,
        limits: DecodeLimits,
        generator: torch.Generator | None,
    ) -> None:
        from transformers import DynamicCache

        _check(target, prompt_ids)
        self.target = target
        self.outputs: dict[int, Tensor] = {}
        self.limits = limits
        self._device = torch.device(target.device)
        self.prompt_P = torch.tensor(list(prompt_ids), dtype=torch.int64, device=self._device)
        # Without a config every layer keeps all its tokens, sliding ones too: the mask alone
        # limits what they read, and dropped tokens could not be brought back after a rejection.
        self._cache: Any = DynamicCache()
        # transformers 5.2x calls the argument `cache`, earlier ones `past_key_values`
        names = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._generator = generator or torch.Generator(self._device).manual_seed(0)

    def verify(self, ids_B: Tensor, *, rows: int = 0) -> Tensor:
        """Append *ids_B* to the cache; return int64, the target's choice after each of the last
        *rows* of them (0: all)."""
        out = self.target.model(
            input_ids=ids_B[None],
            use_cache=True,
            logits_to_keep=rows,
            **{self._cache_name: self._cache},
        )
        return self._choose(out.logits[0])

    def features(self, num_tokens: int) -> Tensor:
        """[num_tokens, C]: what the taps gave for the first tokens of the last forward."""
        return torch.cat([self.outputs[tap][:num_tokens] for tap in self.target.taps], dim=-1)

    def forget(self, num_tokens: int) -> None:
        """Roll the cache back; 0 must not reach ``crop``, which older versions read as a length."""
        if num_tokens:
            self._cache.crop(-num_tokens)

    def clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _choose(self, logits_BV: Tensor) -> Tensor:
        if self.limits.temperature < GREEDY_BELOW:
            return logits_BV.argmax(dim=-1)
        probabilities_BV = torch.softmax(logits_BV.float() / self.limits.temperature, dim=-1)
        # argmax of p / Exp(1) is a draw from p: one kernel, no host sync, our generator.
        races_BV = torch.empty_like(probabilities_BV).exponential_(generator=self._generator)
        return (probabilities_BV / races_BV).argmax(dim=-1)


class _Proposer:
    """The drafter's side of one prompt: its context cache, and the block it would go on with."""

    def __init__(self, session: _Session, drafter: Drafter, capacity: int) -> None:
        target, shape = session.target, drafter.shape
        # fp16 overflows where the features are fused (spec, gotcha 10)
        self._dtype = torch.bfloat16 if target.dtype == torch.float16 else target.dtype
        self._target = target
        self._drafter = drafter
        self._cache = ContextCache(
            shape, max_tokens=capacity, device=session.prompt_P.device, dtype=self._dtype
        )
        self._masks_B = session.prompt_P.new_full((shape.block_size - 1,), shape.mask_token_id)
        self._positions = torch.arange(capacity + shape.block_size, device=self._masks_B.device)

    def extend(self, features_PC: Tensor) -> None:
        """Give the drafter the features of tokens that are committed for good."""
        start = self._cache.length
        positions_P = self._positions[start : start + len(features_PC)]
        features_PC = features_PC.to(self._dtype)
        self._drafter.extend_context(self._cache, features_PC[None], positions_P[None])

    def block(self, anchor_1: Tensor) -> Tensor:
        """int64 [B]: the anchor, then the drafter's greedy guess for the B - 1 tokens after it."""
        ids_B = torch.cat([anchor_1, self._masks_B])
        start = self._cache.length
        positions_B = self._positions[start : start + len(ids_B)]
        embeds_BD = F.embedding(ids_B, self._target.embedding_VD).to(self._dtype)
        hidden_BD = self._drafter.draft(embeds_BD[None], positions_B[None], self._cache)[0]
        head_VD = self._target.lm_head_VD
        drafts = F.linear(hidden_BD[1:].to(head_VD.dtype), head_VD).argmax(dim=-1)
        return torch.cat([anchor_1, drafts])


@contextmanager
def _captured(target: "Target", outputs: dict[int, Tensor]) -> Iterator[None]:
    """Keep what the tapped layers put out, in the very forward that verifies."""

    def keeper(tap: int) -> Callable[..., None]:
        def keep(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[tap] = (output if isinstance(output, Tensor) else output[0])[0]

        return keep

    _, layers = decoder_layers(target.model.get_decoder()) or ("", torch.nn.ModuleList())
    handles = [layers[tap].register_forward_hook(keeper(tap)) for tap in target.taps]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(target: "Target", prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise UsageError("the prompt is empty: decoding needs at least one token to start from")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        wrong = next(i for i in prompt_ids if not 0 <= i < target.vocab_size)
        raise UsageError(f"prompt token {wrong} is outside the vocabulary [0, {target.vocab_size})")
    config = target.model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - ROLLS_BACK)
    if kinds or getattr(target.model, "_is_stateful", False):
        raise UsageError(
            f"the target ({config.model_type}) keeps a running state"
            f"{' in its ' + ', '.join(kinds) + ' layers' if kinds else ''} that cannot be rolled "
            "back after a rejected draft, so it cannot be decoded speculatively"
        )
