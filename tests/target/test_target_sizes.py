"""A target's sizes come from its config alone, and are those of the loaded target."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny_runs import write_target

from dflash.config import DrafterConfig, TargetConfig
from dflash.errors import ConfigError, MissingError
from dflash.target.model import Target
from dflash.target.shape import default_shape, shape_for
from dflash.target.sizes import read_sizes, sizes_of


@pytest.fixture
def config_only(place: Path, tmp_path: Path) -> Path:
    shutil.copy(place / "target" / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("taps", ["auto", (2, 0)], ids=str)
def test_a_config_alone_says_what_the_weights_would(
    place: Path, config_only: Path, taps: tuple[int, ...] | Literal["auto"]
) -> None:
    auto = taps == "auto"
    alone = read_sizes(TargetConfig(model=str(config_only), taps=taps, num_taps=1 if auto else 5))
    chosen = 1 if auto else (2, 0)
    loaded = Target.load(place / "target", taps=chosen, device="cpu", dtype=torch.float32)
    counted = sizes_of(loaded.model, taps=chosen)
    assert replace(counted, config=None) == replace(alone, config=None)
    assert alone.taps == loaded.taps
    storages = {w.data_ptr(): w.numel() for w in loaded.model.state_dict().values()}
    assert alone.num_parameters == sum(storages.values())
    assert alone.tables == loaded.embedding_VD.numel(), "tied: one table"
    drafter = DrafterConfig(num_layers=1, mask_token_id=103)
    shape = shape_for(
        alone.config, drafter, taps=alone.taps, vocab_size=alone.vocab_size, mask_token_id=103
    )
    assert shape == default_shape(loaded, drafter)


def test_an_lm_head_of_its_own_is_a_second_table(tmp_path: Path) -> None:
    config = (write_target(tmp_path) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('embeddings": true', 'embeddings": false'))
    sizes = read_sizes(TargetConfig(model=str(tmp_path), taps=(0, 2)))
    assert sizes.tables == 2 * sizes.vocab_size * sizes.hidden_size


def test_a_folder_without_a_config_is_told_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"the config.json of the model is enough"):
        read_sizes(TargetConfig(model=str(tmp_path)))


def test_a_config_of_no_language_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_sizes(TargetConfig(model=str(tmp_path)))
    assert len(caught.value.what.splitlines()) == 1
