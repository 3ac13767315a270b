import json
from dataclasses import replace
from typing import Any

import pytest
from drafter_cases import GOLDEN, TINY

from dflash.drafter.shape import DrafterShape
from dflash.drafter.zlab import from_zlab, to_zlab
from dflash.errors import CheckpointError, ConfigError

QWEN3_8B = DrafterShape(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    block_size=16,
    mask_token_id=151669,
    vocab_size=151936,
    rope_theta=1_000_000.0,
)


def written() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(to_zlab(TINY, dtype="bfloat16")))
    return config


@pytest.mark.parametrize("shape", [TINY, QWEN3_8B, replace(TINY, attention_bias=True)])
def test_a_shape_survives_being_written_as_json(shape: DrafterShape) -> None:
    config = json.loads(json.dumps(to_zlab(shape, dtype="float32")))
    assert from_zlab(config) == shape
    assert config["dtype"] == "float32"


def test_the_golden_config_is_read() -> None:
    shape = from_zlab(json.loads((GOLDEN / "config.json").read_text()))
    assert (shape.block_size, shape.mask_token_id, shape.num_layers) == (8, 130, 3)
    assert shape.target_layer_ids == (1, 2, 3, 4)
    assert shape.rope_theta == 1_000_000.0


def test_what_readers_look_for_in_two_places_is_written_in_both() -> None:
    config = written()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["rope_scaling"] is None
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8
    assert config["is_causal"] is False
    assert config["layer_types"] == ["full_attention", "full_attention"]


@pytest.mark.parametrize("place", ["top", "nested"])
def test_the_block_size_is_read_from_either_place(place: str) -> None:
    config = written()
    del (config if place == "top" else config["dflash_config"])["block_size"]
    assert from_zlab(config) == TINY


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters", "rope_scaling"])
def test_the_rotary_base_is_read_from_either_form(place: str) -> None:
    config = written()
    del config[place]
    assert from_zlab(config) == TINY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 16}, "block_size is 16 in one place and 8 in the other"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0 in one place and 10000.0 in the other"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"is_causal": True}, "causal blocks are not supported"),
        ({"partial_rotary_factor": 0.25}, "partial or multi-axis rotary"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"scaled rotary .*\(yarn\)"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, r"scaled rotary .*\(linear\)"),
        (
            {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "llama3"}},
            r"scaled rotary .*\(llama3\)",
        ),
        (
            {"rope_parameters": {"rope_theta": 10_000.0, "mrope_section": [1, 2]}},
            "multi-axis rotary",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"conv_kernel_size": 2}, "conv_kernel_size belongs to another kind of drafter"),
        ({"speculators_model_type": "dflash"}, "in the layout of the speculators library"),
        ({"num_attention_heads": 3}, "num_heads = 3 must be a multiple of num_kv_heads = 2"),
        ({"num_target_layers": 4}, r"target_layer_ids must lie in \[0, 3\)"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_zlab(written() | change)


@pytest.mark.parametrize("key", ["causal", "use_swa", "selector_rank", "final_logit_softcapping"])
def test_a_nested_key_that_changes_the_arithmetic_is_refused(key: str) -> None:
    config = written()
    config["dflash_config"][key] = 16
    with pytest.raises(CheckpointError, match="cannot be used"):
        from_zlab(config)


def test_everything_that_is_missing_is_named_at_once() -> None:
    config = written()
    for key in ("hidden_size", "num_target_layers", "rope_theta", "rope_parameters"):
        del config[key]
    del config["dflash_config"]["mask_token_id"]
    with pytest.raises(CheckpointError) as caught:
        from_zlab(config)
    for name in ("hidden_size", "num_target_layers", "rope_theta", "dflash_config.mask_token_id"):
        assert f"{name} is missing" in caught.value.what


def test_parameter_counts_are_the_published_ones() -> None:
    # spec 1.3, in billions
    small = {"intermediate_size": 3072, "num_heads": 16}
    assert round(QWEN3_8B.num_parameters / 1e9, 3) == 1.049
    medium = replace(QWEN3_8B, hidden_size=2048, intermediate_size=6144, num_heads=16)
    assert round(medium.num_parameters / 1e9, 3) == 0.273
    tiny = replace(QWEN3_8B, hidden_size=1024, **small)
    assert round(tiny.num_parameters / 1e9, 3) == 0.084


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_heads = 4 must be a multiple of num_kv_heads = 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"mask_token_id": 61}, r"mask_token_id = 61 must lie in \[0, 61\)"),
        ({"target_layer_ids": ()}, "at least one layer"),
        ({"target_layer_ids": (1, 1)}, "repeats a layer"),
        ({"target_layer_ids": (1, 5)}, r"must lie in \[0, 5\)"),
        ({"target_layer_ids": (-1,)}, r"must lie in \[0, 5\)"),
    ],
)
def test_an_impossible_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)
