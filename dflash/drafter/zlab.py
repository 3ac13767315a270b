"""A drafter's shape as z-lab's ``config.json`` and back; the weights' keys need no translation.

The written config is a superset that transformers 4.57 and 5, SGLang and vLLM read alike: the
rotary base and the block size stand in both places where readers look for them.
"""

from typing import Any

from dflash.drafter.shape import DrafterShape
from dflash.errors import CheckpointError, ConfigError

# z-lab's name for each plain field of a shape.
_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_target_layers": "num_target_layers",
    "vocab_size": "vocab_size",
}
_OPTIONAL_NAMES = ("rms_norm_eps", "attention_bias", "max_position_embeddings")
# Keys of later drafter families that change the arithmetic (DFlash 2, Domino, DSpark).
_FOREIGN_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "conv_kernel_size",
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "projector_type",
    "selector_rank",
    "selector_top_k",
)


def to_zlab(shape: DrafterShape, *, dtype: str) -> dict[str, Any]:
    """Return the config of a drafter whose weights are stored as ``dtype`` (e.g. "bfloat16")."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "is_causal": False,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
    }
    config |= {theirs: getattr(shape, ours) for ours, theirs in _NAMES.items()}
    config |= {name: getattr(shape, name) for name in _OPTIONAL_NAMES}
    return config | {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "layer_types": ["full_attention"] * shape.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.num_layers,
        "use_cache": True,
        "dtype": dtype,
    }


def from_zlab(config: dict[str, Any]) -> DrafterShape:
    """Read a shape from the content of a z-lab ``config.json``.

    Raises:
        CheckpointError: a needed key is missing, two places contradict each other, or the drafter
            is of a kind that this trainer does not compute; everything found is listed.
    """
    if config.get("speculators_model_type") is not None:
        raise CheckpointError(
            "the drafter is in the layout of the speculators library (speculators_model_type ="
            f" {config['speculators_model_type']!r}), which is written and never read here",
            hint="name the run, the checkpoint or the z-lab folder that it was made from",
        )
    nested = config.get("dflash_config") or {}
    problems = _missing(config, nested) + _unsupported(config, nested)
    block_size = _agreed("block_size", (config, nested), problems)
    rope = config.get("rope_parameters") or {}
    rope_theta = _agreed("rope_theta", (config, rope), problems)
    if problems:
        raise CheckpointError("the drafter's config.json cannot be used: " + "; ".join(problems))
    fields = {ours: config[theirs] for ours, theirs in _NAMES.items()}
    fields |= {name: config[name] for name in _OPTIONAL_NAMES if name in config}
    try:
        return DrafterShape(
            **fields,
            target_layer_ids=tuple(nested["target_layer_ids"]),
            mask_token_id=nested["mask_token_id"],
            block_size=block_size,
            rope_theta=float(rope_theta),
        )
    except ConfigError as error:
        raise CheckpointError(error.what) from error


def _missing(config: dict[str, Any], nested: dict[str, Any]) -> list[str]:
    wanted = [(name, config) for name in _NAMES.values()]
    wanted += [(name, nested) for name in ("target_layer_ids", "mask_token_id")]
    return [
        f"{'dflash_config.' if table is nested else ''}{name} is missing"
        for name, table in wanted
        if table.get(name) is None
    ]


def _agreed(name: str, tables: tuple[dict[str, Any], ...], problems: list[str]) -> Any:  # noqa: ANN401  JSON
    """Return the one value that either place gives; report none or two."""
    values = [table[name] for table in tables if table.get(name) is not None]
    if not values:
        problems.append(f"{name} is missing")
        return None
    if values[0] != values[-1]:
        problems.append(f"{name} is {values[0]} in one place and {values[-1]} in the other")
    return values[0]


def _unsupported(config: dict[str, Any], nested: dict[str, Any]) -> list[str]:
    problems = [
        f"{key} belongs to another kind of drafter"
        for key in _FOREIGN_KEYS
        if config.get(key) is not None or nested.get(key) is not None
    ]
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act must be silu, got {config['hidden_act']}")
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds or config.get("use_sliding_window") or nested.get("use_swa"):
        problems.append("sliding-window layers are not supported, only full_attention")
    if config.get("is_causal") or nested.get("causal"):
        problems.append("causal blocks are not supported, only bidirectional ones")
    for table in (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            problems.append(f"scaled rotary positions ({kind}) are not supported")
        if table.get("partial_rotary_factor", 1.0) != 1.0 or table.get("mrope_section"):
            problems.append("partial or multi-axis rotary positions are not supported")
    return problems
