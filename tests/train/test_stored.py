"""A stored drafter is found, checked and read; what cannot be trusted is named in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_drafter, write_checkpoint

from dflash.errors import CheckpointError
from dflash.train.stored import complete_checkpoints, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"


def run_with_steps(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        write_checkpoint(folder, tiny_drafter(seed=step), step=step)
    return tmp_path


def test_a_checkpoint_gives_back_shape_weights_step_and_target(tmp_path: Path) -> None:
    drafter = tiny_drafter(seed=3)
    stored = open_checkpoint(write_checkpoint(tmp_path / "step-00000007", drafter, step=7, tau=2.5))
    assert (stored.shape, stored.step, stored.tau) == (drafter.shape, 7, 2.5)
    assert (stored.target_source, stored.target_fingerprint) == ("targets/tiny-lm", "f" * 64)
    rebuilt = stored.drafter(device="cpu", dtype=torch.float32)
    assert not rebuilt.training
    for name, weight in drafter.state_dict().items():
        assert torch.equal(rebuilt.state_dict()[name], weight)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    run = run_with_steps(tmp_path, 8, 20, 100)
    (run / "checkpoints" / "step-00000300").mkdir()  # half written: no manifest
    (run / "checkpoints" / "step-00000200.partial").mkdir()
    stored = open_checkpoint(run)
    assert (stored.step, stored.run_dir) == (100, run)
    assert [f.name for f in complete_checkpoints(run)] == [
        "step-00000008",
        "step-00000020",
        "step-00000100",
    ]


def test_a_run_folder_stands_for_its_best_checkpoint_if_one_is_named(tmp_path: Path) -> None:
    run = run_with_steps(tmp_path, 8, 20)
    (run / "checkpoints" / "best").write_text("step-00000008\n")
    assert open_checkpoint(run).step == 8


def test_a_zlab_folder_is_read_and_names_no_target() -> None:
    stored = open_checkpoint(GOLDEN)
    assert stored.shape.target_layer_ids == (1, 2, 3, 4)
    assert (stored.step, stored.target_source, stored.run_dir) == (None, None, None)


def damage_weights(folder: Path) -> None:
    path = folder / "drafter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format_version": 1, "step"')


def age(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 0}))


def forget_step(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["step"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (damage_weights, r"is damaged: sha256 of drafter\.safetensors is"),
        (damage_manifest, r"manifest\.json is not readable JSON"),
        (age, r"has checkpoint format 0, this version reads 1"),
        (forget_step, r"manifest\.json is damaged: step: Field required"),
        (lambda f: (f / "drafter.safetensors").unlink(), r"drafter\.safetensors is missing"),
        (lambda f: (f / "manifest.json").unlink(), r"is incomplete: it has no manifest\.json"),
    ],
)
def test_a_checkpoint_that_cannot_be_trusted_is_refused(
    tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    folder = write_checkpoint(tmp_path / "step-00000007", tiny_drafter(), step=7)
    harm(folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 13


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint folder at"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither a run folder, nor a checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        open_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "best").write_text("step-00000001\n")
    with pytest.raises(CheckpointError, match="names step-00000001, which is not a comp") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint.startswith(f"none in {tmp_path} is; dflash train sets it aside")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("norm.weight"), r"norm\.weight is missing \(1 such"),
        (lambda w: w.update({"head.weight": torch.ones(1)}), r"head\.weight is not part of"),
        (lambda w: w.update({"norm.weight": torch.ones(5)}), r"norm\.weight has shape \[5\]"),
    ],
)
def test_weights_that_contradict_their_config_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    weights = load_file(GOLDEN / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_a_truncated_zlab_file_is_refused(tmp_path: Path) -> None:
    content = (GOLDEN / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    (tmp_path / "config.json").write_bytes((GOLDEN / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        open_checkpoint(tmp_path)
