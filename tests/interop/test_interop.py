"""The interop program accepts a sound export and names what is wrong with a broken one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_export
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return check_export.export_golden(tmp_path / "exported")


def test_the_program_passes_on_its_own_export() -> None:
    program = Path(check_export.__file__)
    found_from = os.environ | {"PYTHONPATH": str(program.parents[2])}  # installed or not
    done = subprocess.run(
        [sys.executable, program], env=found_from, check=False, capture_output=True
    )
    assert b"config, frequencies, keys, dtypes and outputs agree" in done.stdout, done.stderr
    assert done.returncode == 0


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("fc.weight"), "fc.weight is missing"),
        (lambda w: w.update({"lm_head.weight": torch.ones(1)}), "is not part of the format"),
        (lambda w: w.update({"norm.weight": w["norm.weight"].float()}), "not bfloat16"),
        (lambda w: w.update({"norm.weight": w["norm.weight"][:3]}), "has shape (3,)"),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    change_weights(folder, change)
    assert says in "\n".join(check_export.problems_of(folder))


def test_a_rotary_base_that_transformers_reads_otherwise_is_named(folder: Path) -> None:
    def differ(config: dict[str, Any]) -> None:
        config["rope_theta"] = 777.0
        config["rope_parameters"]["rope_theta"] = 55.0

    change_config(folder, differ)
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_theta"] = 1234.0
    found = list(check_export._config_problems(folder, raw))  # noqa: SLF001
    assert any("frequencies of another base than 1234" in line for line in found)


def test_block_sizes_that_disagree_are_named(folder: Path) -> None:
    change_config(folder, lambda c: c["dflash_config"].update({"block_size": 9}))
    assert "block_size differs" in "\n".join(check_export.problems_of(folder))


def test_other_features_give_another_block(folder: Path) -> None:
    """The independent formula is sensitive: it is no constant that always agrees."""
    weights = load_file(folder / "model.safetensors")
    config = check_export.Qwen3Config.from_pretrained(folder)
    block = torch.ones(8, 32).bfloat16()
    one, two = (
        check_export.block_output(
            weights, config, block, features=torch.full((4, 128), scale).bfloat16().cumsum(1)
        )
        for scale in (0.1, -0.1)
    )
    assert (one - two).abs().max() > 10 * check_export.BF16_TOLERANCE


REFERENCE = '''
class DFlashDraftModel:
    """Stands for z-lab's class."""

    @classmethod
    def from_pretrained(cls, folder, *, dtype, output_loading_info):
        return cls(), {"missing_keys": [%s], "unexpected_keys": []}

    def eval(self):
        return self

    def __call__(self, *, noise_embedding, target_hidden, position_ids):
        return noise_embedding * 0
'''


def test_a_reference_class_that_disagrees_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "reference.py"
    path.write_text(REFERENCE % "'fc.weight'")
    found = check_export.problems_of(folder, path)
    assert found == [
        "the reference class reports missing_keys: ['fc.weight']",
        "the reference class computes another block",
    ]
