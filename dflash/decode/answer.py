"""What is asked of a decoder, what it gives back, and where an answer ends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dflash.errors import UsageError

OnBlock = Callable[[list[int], int], None]
"""Called with the tokens just committed and how many of them were accepted drafts."""

DecodeLoop = Literal["captured", "eager"]


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


def num_positions(config: Any) -> int | None:  # noqa: ANN401 (a transformers config)
    """Tokens that a target of this configuration was made for, prompt and answer together.

    None where it does not say. Scaled rotary positions reach as far as their factor says.
    """
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    before = scaling.get("original_max_position_embeddings")
    scaled = round((scaling.get("factor") or 1) * before) if before else 0
    return None if stated is None else max(stated, scaled)


def answer_room(config: Any, num_prompt_tokens: int) -> int | None:  # noqa: ANN401 (as above)
    """How long the answer to a prompt can become; None where the target does not say.

    Raises:
        UsageError: there is room for none.
    """
    positions = num_positions(config)
    if positions is None:
        return None
    if num_prompt_tokens >= positions:
        raise UsageError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer: the target was"
            f" made for {positions} tokens (max_position_embeddings)",
            hint="shorten the prompt",
        )
    return positions - num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One decoded prompt.

    ``tokens`` are the generated ones only, cut after the first stop id. ``accepted`` holds m + 1
    for every verify step: m accepted drafts and the target's own next token; the last step counts
    in full even where its tokens were cut. ``prefill_s`` covers the prompt in the target and in
    the drafter's context cache; ``decode_s`` everything after it. Capturing, which happens between
    the two and once for many prompts, is in neither. ``eager_because`` is why the loop was eager.
    """

    tokens: list[int]
    accepted: list[int]
    prefill_s: float
    decode_s: float
    finished_by: Literal["stop", "length"]
    decode_loop: DecodeLoop = "eager"
    eager_because: str | None = None

    @property
    def tau(self) -> float | None:
        """Mean tokens committed per verify step; None if the prefill already ended the answer."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def num_decoded(self) -> int:
        """Tokens that ``decode_s`` paid for: all but the first, which the prefill gives."""
        return len(self.tokens) - 1


class Answer:
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
