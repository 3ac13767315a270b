"""Shapes come from files that a user can read, override and add to; mistakes are told at once."""

import json
from pathlib import Path

import pytest

from dflash.errors import ConfigError, UsageError
from dflash_bench.lengths import batch_lengths, length_of_step
from dflash_bench.shape_files import shape_names
from dflash_bench.shapes import named_shape, shape_of_config

ROOT = Path(__file__).parents[2]


def test_every_shape_of_the_issue_is_there_small_ones_first() -> None:
    names = ["tiny", "smollm2", "qwen3-8b-3072", "packed-24k", "packed-49k"]
    assert shape_names() == names
    assert [named_shape(name).token_budget for name in names] == [256, 16384, 3072, 24576, 49152]


def test_shape_a_is_what_rivals_use() -> None:
    shape = named_shape("qwen3-8b-3072")
    assert (shape.num_anchors, shape.num_documents, shape.drafter.block_size) == (512, 1, 16)


def test_an_override_has_its_way_and_is_in_the_name() -> None:
    shape = named_shape("tiny", ["token_budget=512", "drafter.num_layers=1"])
    assert (shape.token_budget, shape.num_anchors, shape.drafter.num_layers) == (512, 64, 1)
    assert shape.name == "tiny:token_budget=512:drafter.num_layers=1"
    assert named_shape("tiny", ["num_anchors=48"]).num_anchors == 48


@pytest.mark.parametrize(
    ("name", "override", "told"),
    [
        ("tinny", None, "did you mean tiny"),
        ("tiny", "token_budgt=512", "did you mean token_budget"),
        ("tiny", "token_budget", "key=value"),
        ("tiny", "token_budget=lots", "no number"),
        ("tiny", "token_budget=100", "token_budget cannot be 100: it comes in multiples of 128"),
        ("tiny", "token_budget=0", "token_budget cannot be 0"),
        ("tiny", f"token_budget={10**400}", "64 bits"),
        ("tiny", "num_anchors=0", "num_anchors cannot be 0"),
        ("tiny", "num_anchors=257", "num_anchors cannot be 257: it comes in multiples of 16"),
        ("tiny", "num_documents=0", "num_documents cannot be 0"),
        ("tiny", "num_documents=86", "256 tokens hold at most 85 documents of 3"),
        ("tiny", "num_documents=1000", "num_documents cannot be 1000: 256 tokens hold at most 85"),
        ("tiny", "drafter.rope_theta=nan", "drafter.rope_theta cannot be nan"),
        ("tiny", "drafter.rope_theta=inf", "drafter.rope_theta cannot be inf"),
        ("tiny", "drafter.rope_theta=0", "drafter.rope_theta cannot be 0.0: it is above 0"),
        ("tiny", "drafter.rms_norm_eps=-inf", "drafter.rms_norm_eps cannot be -inf"),
        ("tiny", "num_anchors=nan", "num_anchors"),
        ("tiny", "drafter.num_heads='many'", "drafter.num_heads"),
        ("tiny", "drafter.num_heads=3", "multiple of num_kv_heads"),
        ("tiny", "anchor_density=nan", "anchor_density"),
    ],
)
def test_a_mistake_is_told_by_its_name(name: str, override: str | None, told: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=told):
        named_shape(name, [] if override is None else [override])


def test_the_most_documents_that_a_batch_can_have_are_taken() -> None:
    shape = named_shape("tiny", ["num_documents=85", "num_anchors=256"])  # 3 * 85 = 255 of 256
    assert (shape.num_documents, shape.num_anchors) == (85, 256)


def test_a_shape_that_is_made_of_another_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"shape odd: num_anchors cannot be 7: .* of 16; num_doc"):
        named_shape("tiny").with_(name="odd", num_anchors=7, num_documents=300)


def test_a_training_configuration_is_a_shape() -> None:
    shape = shape_of_config(ROOT / "configs" / "quickstart.toml", ["data.token_budget=512"])
    assert shape.name == "quickstart:data.token_budget=512"
    assert shape.token_budget == 512
    assert shape.drafter.num_target_layers > max(shape.drafter.target_layer_ids) + 1


def test_the_record_of_a_shape_is_what_json_reads_back() -> None:
    record = named_shape("tiny").record()
    assert json.loads(json.dumps(record)) == record
    assert record["drafter"]["target_layer_ids"] == [1, 3]


def test_varying_lengths_come_each_as_often_in_an_order_that_changes() -> None:
    lengths = batch_lengths(3072, on_gpu=True)
    assert len(lengths) == 3
    assert all(length % 128 == 0 for length in lengths)
    assert lengths[-1] == 3072
    assert abs(lengths[0] - 0.35 * 3072) <= 64
    rounds = [
        [length_of_step(3 * turn + place, lengths, seed=0) for place in range(3)]
        for turn in range(20)
    ]
    assert all(sorted(each) == list(lengths) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 5
    other = [length_of_step(number, lengths, seed=1) for number in range(40)]
    assert other != [length_of_step(number, lengths, seed=0) for number in range(40)]


def test_a_batch_too_short_for_three_lengths_has_fewer() -> None:
    assert batch_lengths(256, on_gpu=True) == (128, 256)
    assert batch_lengths(256, on_gpu=False) == (88, 176, 256)


def test_a_shapes_name_is_one_line_however_its_overrides_are_written() -> None:
    assert named_shape("tiny", ["token_budget=\n 512"]).name == "tiny:token_budget=512"
