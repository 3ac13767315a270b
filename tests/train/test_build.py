"""What building refuses before it allocates anything."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from dflash.errors import ConfigError
from dflash.target.shape import default_shape
from dflash.train.build import load_targets, make_steps
from dflash.train.devices import settle_devices


def test_heads_too_small_for_attention_on_a_gpu_are_refused_with_the_rule(place: Path) -> None:
    config = tiny_config(place)
    settled = settle_devices(config)
    targets = load_targets(config, settled)
    shape = replace(default_shape(targets[0], config.drafter), head_dim=8)
    assert len(make_steps(config, settled, shape, targets=targets)) == 1, "a CPU takes any"
    on_gpu = replace(settled, drafters=("cuda:0",))
    with pytest.raises(ConfigError, match=r"drafter.head_dim = 8: .* at least 16") as caught:
        make_steps(config, on_gpu, shape, targets=targets)
    assert "drafter.head_dim = 16" in caught.value.hint
