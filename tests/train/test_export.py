"""An export holds the published keys and config, says what was measured, and is read back."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import CONFIGS, tiny_drafter, tiny_target, write_checkpoint

import dflash.train.export as export_module
from dflash.config import starter_config, to_toml
from dflash.errors import CheckpointError, UsageError
from dflash.records import EvalRecord, RecordWriter
from dflash.train.export import export_speculators, export_zlab
from dflash.train.stored import StoredDrafter, open_checkpoint

if TYPE_CHECKING:
    from dflash.target.model import Target


def stored_in_a_run(tmp_path: Path, *, step: int = 40) -> StoredDrafter:
    folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    return open_checkpoint(write_checkpoint(folder, tiny_drafter(seed=5), step=step))


def test_the_zlab_folder_holds_the_keys_of_the_format_in_bf16(tmp_path: Path) -> None:
    stored = stored_in_a_run(tmp_path)
    export_zlab(stored, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert len(weights) == 11 * stored.shape.num_layers + 3
    for name, master in stored.weights.items():
        assert master.dtype == torch.float32
        assert torch.equal(weights[name], master.to(torch.bfloat16))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_the_config_says_the_base_and_the_block_size_where_every_reader_looks(
    tmp_path: Path,
) -> None:
    export_zlab(stored_in_a_run(tmp_path), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["block_size"] == config["dflash_config"]["block_size"] == 6
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["DFlashDraftModel"]


def test_an_export_is_itself_a_stored_drafter(tmp_path: Path) -> None:
    stored = stored_in_a_run(tmp_path)
    export_zlab(stored, tmp_path / "once")
    export_zlab(open_checkpoint(tmp_path / "once"), tmp_path / "twice")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_card_shows_the_figures_of_this_step_and_no_folder_of_this_machine(
    tmp_path: Path,
) -> None:
    stored = stored_in_a_run(tmp_path)
    run = tmp_path / "run"
    config = starter_config()
    data = config.data.model_copy(update={"train": ("/somewhere/private/chats.jsonl",)})
    (run / "config.toml").write_text(to_toml(config.model_copy(update={"data": data})))
    with RecordWriter(run / "records.jsonl") as records:
        for step, tau in ((20, 1.11), (40, 3.21), (60, 9.99)):
            records.write(
                EvalRecord(
                    step=step,
                    tau=tau,
                    tau_per_prompt=[tau],
                    accepted_per_position=[0.5],
                    tokens_per_s_drafter=10.0,
                    num_prompts=16,
                    max_new_tokens=128,
                )
            )
    export_zlab(stored, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| tau | 3.21 on 16 held-out prompts, 128 new tokens, temperature 0 |" in card
    assert "| training steps | 40 |" in card
    assert "| target | tiny-lm (fingerprint ffffffffffff) |" in card
    assert "| training data | chats.jsonl |" in card
    assert '"num_speculative_tokens": 5' in card
    assert "--speculative-num-draft-tokens 6" in card
    for private in ("/somewhere", str(tmp_path), "9.99", "1.11"):
        assert private not in card


def test_a_card_without_a_run_says_that_nothing_was_measured(tmp_path: Path) -> None:
    export_zlab(stored_in_a_run(tmp_path), tmp_path / "out")
    assert "| tau | not measured |" in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    stored = stored_in_a_run(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    export_zlab(stored, out)  # an empty one is taken
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(UsageError, match="exists already and is not an empty folder"):
        export_zlab(stored, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    stored = stored_in_a_run(tmp_path)
    stored.weights["fc.weight"][0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"fc\.weight of .* not finite \(1 such"):
        export_zlab(stored, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_does_not_read_back_equal_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for a disk that loses a bit: what is written is not what was meant."""
    real = export_module.save_file

    def lossy(weights: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        real(weights | {"norm.weight": weights["norm.weight"] * 2}, path, metadata)

    monkeypatch.setattr(export_module, "save_file", lossy)
    with pytest.raises(CheckpointError, match=r"norm\.weight in .* does not read back"):
        export_zlab(stored_in_a_run(tmp_path), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "save_file", full)
    stored = stored_in_a_run(tmp_path)
    for out in (tmp_path / "out", tmp_path / "new" / "parents" / "out"):
        with pytest.raises(CheckpointError, match="out cannot be written: No space left") as caught:
            export_zlab(stored, out)
        assert "space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_speculators_folder_counts_layers_from_the_embedding_and_is_self_contained(
    tmp_path: Path,
) -> None:
    stored, target = stored_in_a_run(tmp_path), tiny_target(CONFIGS["qwen3"]())
    export_speculators(stored, tmp_path / "out", target=target, name="org/tiny-lm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert (config["block_size"], config["mask_token_id"]) == (6, 66)
    assert config["draft_vocab_size"] == 67
    [method] = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 5)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny-lm",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert "dflash_config" not in config["transformer_layer_config"]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    weights = load_file(tmp_path / "out" / "model.safetensors")
    extra = weights.keys() - stored.weights.keys()
    assert extra == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(weights["lm_head.weight"], target.lm_head_VD.bfloat16())
    assert torch.equal(weights["embed_tokens.weight"], target.embedding_VD.bfloat16())


def test_tied_embeddings_are_written_as_two_tensors(tmp_path: Path) -> None:
    target = tiny_target(CONFIGS["qwen3"]())
    tied = cast("Target", SimpleNamespace(**vars(target) | {"lm_head_VD": target.embedding_VD}))
    export_speculators(stored_in_a_run(tmp_path), tmp_path / "out", target=tied, name="tiny")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["embed_tokens.weight"])
