"""Which models may be targets: those whose documents can be packed without reading each other.

A model that mixes neighbouring tokens by anything but attention (convolution, state space, linear
attention) would leak one document into the next without any error, so it is refused here.
"""

from typing import Any

from torch import nn

from dflash.errors import ConfigError
from dflash.target.sharing import decoder_layers

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
MIXER_KEYS = ("mamba", "ssm_", "conv_", "linear_", "rwkv", "short_conv", "layers_block_type")
"""Config keys that only models with other token mixers have."""

BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""RoPE kinds whose angles depend on the longest sequence of the batch, so on the neighbours."""


def rope_parameters(config: Any) -> list[dict[str, Any]]:  # noqa: ANN401 (a transformers config)
    """Return the RoPE dicts of a text config of either version, full attention first."""
    new = getattr(config, "rope_parameters", None)
    if isinstance(new, dict) and new:
        if all(isinstance(value, dict) for value in new.values()):
            return [new[kind] for kind in sorted(new)]  # "full_attention" before "sliding_..."
        return [new]
    scaling = getattr(config, "rope_scaling", None) or {}
    theta = getattr(config, "rope_theta", None)
    return [{"rope_type": "default", **scaling, **({} if theta is None else {"rope_theta": theta})}]


def rope_theta(config: Any) -> float:  # noqa: ANN401 (a transformers config)
    """Return the base of the rotary positions; of full attention where the kinds differ."""
    return float(rope_parameters(config)[0].get("rope_theta", 10000.0))


def check_packable(model: Any) -> None:  # noqa: ANN401 (a transformers model)
    """Refuse a model whose packed features would differ from each document run alone.

    Raises:
        ConfigError: naming every reason.
    """
    facts = _facts(model, model.get_decoder(), model.config.get_text_config(decoder=True))
    reasons = [reason for broken, reason in facts if broken]
    if reasons:
        raise ConfigError(
            f"target.model: {type(model).__name__} {'; it '.join(reasons)}: its documents cannot "
            "be packed without reading each other",
            hint="train with a target that has plain or sliding softmax attention in every layer",
        )


def _facts(model: Any, base: nn.Module, config: Any) -> list[tuple[bool, str]]:  # noqa: ANN401
    other = sorted(set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS)
    keys = sorted(key for key in config.to_dict() if key.startswith(MIXER_KEYS))
    rope = {str(p.get("rope_type", p.get("type"))) for p in rope_parameters(config)}
    rope &= BATCH_DEPENDENT_ROPE
    stateful = bool(keys) or getattr(model, "_is_stateful", False)
    replaceable = getattr(model, "_supports_attention_backend", False)
    return [
        (getattr(model.config, "is_encoder_decoder", False), "is an encoder-decoder"),
        (bool(other), f"has {', '.join(other)} layers"),
        (
            stateful and not other,
            f"mixes tokens outside attention ({', '.join(keys) or 'a state'})",
        ),
        (not replaceable and not stateful, "does not let its attention be replaced"),
        (decoder_layers(base) is None, "has no list of decoder layers"),
        (
            bool(getattr(config, "use_bidirectional_attention", None)),
            "attends in both directions",
        ),
        (bool(rope), f"has {', '.join(sorted(rope))} RoPE, whose angles depend on the batch"),
    ]
