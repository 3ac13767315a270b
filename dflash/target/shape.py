"""The drafter's shape that fits a target, where the configuration leaves it open."""

from typing import Any

from dflash.config import DrafterConfig
from dflash.drafter.shape import DrafterShape
from dflash.errors import ConfigError
from dflash.target.model import Target
from dflash.target.packable import rope_theta

MAX_LISTED = 8


def default_shape(target: Target, drafter: DrafterConfig) -> DrafterShape:
    """Take from the configuration what it says, from the target the rest.

    Raises:
        ConfigError: the mask token is missing or ambiguous, or the shape contradicts itself.
    """
    return shape_for(
        target.config,
        drafter,
        taps=target.taps,
        vocab_size=target.vocab_size,
        mask_token_id=mask_token_id(target, drafter.mask_token_id),
    )


def shape_for(
    config: Any,  # noqa: ANN401 (a transformers text config)
    drafter: DrafterConfig,
    *,
    taps: tuple[int, ...],
    vocab_size: int,
    mask_token_id: int,
) -> DrafterShape:
    """The same from the target's config alone.

    Raises:
        ConfigError: the shape contradicts itself.
    """
    hidden_size = int(config.hidden_size)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden_size // config.num_attention_heads
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=drafter.intermediate_size or int(config.intermediate_size),
        num_layers=drafter.num_layers,
        num_heads=drafter.num_heads or int(config.num_attention_heads),
        num_kv_heads=drafter.num_kv_heads or int(kv_heads),
        head_dim=drafter.head_dim or int(head_dim),
        target_layer_ids=taps,
        num_target_layers=int(config.num_hidden_layers),
        block_size=drafter.block_size,
        mask_token_id=mask_token_id,
        vocab_size=vocab_size,
        rope_theta=rope_theta(config),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.max_position_embeddings),
    )


def mask_token_id(target: Target, chosen: int | None) -> int:
    """Return the id whose embedding row stands for a slot that is not drafted yet.

    Without a choice: the first spare row, that is the first id past the tokenizer's last.

    Raises:
        ConfigError: the choice ends or pads text or lies outside the table; or there is neither a
            choice nor a spare row.
    """
    forbidden = {*target.stop_ids, getattr(target.tokenizer, "pad_token_id", None)}
    if chosen is not None:
        if not 0 <= chosen < target.vocab_size:
            raise ConfigError(
                f"drafter.mask_token_id = {chosen} lies outside the target's table of "
                f"{target.vocab_size} rows"
            )
        if chosen in forbidden:
            raise ConfigError(
                f"drafter.mask_token_id = {chosen} pads or ends text; the mask must never occur",
                hint=_suggestion(target),
            )
        return chosen
    spare = [i for i in range(len(target.tokenizer), target.vocab_size) if i not in forbidden]
    if not spare:
        raise ConfigError(
            "drafter.mask_token_id must be given: the target's embedding table has no row beyond "
            f"its tokenizer's {len(target.tokenizer)} tokens",
            hint=_suggestion(target),
        )
    return spare[0]


def reserved_ids(target: Target) -> dict[int, str]:
    """Return special tokens that neither end, pad nor begin text nor occur in the chat template."""
    tokenizer = target.tokenizer
    named = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad", "unk")}
    template = str(tokenizer.chat_template or "")
    return {
        token_id: str(token)
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
        and token_id not in {*named, *target.stop_ids}
        and token_id < target.vocab_size
        and str(token) not in template
    }


def _suggestion(target: Target) -> str:
    listed = list(reserved_ids(target).items())[:MAX_LISTED]
    if not listed:
        return "choose a token that never occurs in your text"
    shown = ", ".join(f"{token_id} {token}" for token_id, token in listed)
    return f"choose a special token that never occurs in your text, such as {shown}"
