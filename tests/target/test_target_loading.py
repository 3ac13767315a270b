"""What can be a target is loaded right; what cannot is refused with its reason."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from target_models import SMALL, random_model, write_model, write_tokenizer

from dflash.config import DrafterConfig
from dflash.errors import ConfigError, MissingError
from dflash.target.loading import Loaded, load_tokenizer, resolve_source
from dflash.target.model import Target
from dflash.target.packable import rope_parameters
from dflash.target.shape import default_shape, mask_token_id, reserved_ids
from dflash.target.taps import check_taps, default_taps


def load(source: Path | str, **changes: object) -> Target:
    wanted = {"taps": [0, 2], "device": "cpu", "dtype": torch.float32} | changes
    return Target.load(source, **wanted)


def test_default_taps_are_those_of_the_published_table() -> None:
    table = {
        (28, 5): (1, 7, 13, 19, 25),
        (36, 5): (1, 9, 17, 25, 33),
        (36, 3): (1, 17, 33),
        (24, 5): (1, 6, 11, 16, 21),
        (48, 8): (1, 7, 14, 20, 26, 32, 39, 45),
        (62, 6): (1, 13, 24, 36, 47, 59),
        (16, 5): (1, 4, 7, 10, 13),
        (8, 5): (1, 2, 3, 4, 5),
        (36, 1): (18,),
    }
    assert {key: default_taps(*key) for key in table} == table
    with pytest.raises(ConfigError, match=r"num_taps = 5 does not fit a target of 6 layers"):
        default_taps(6, 5)


@pytest.mark.parametrize(
    ("taps", "reason"),
    [
        ([1, 5], "the target's last layer"),
        ([-1], "names -1"),
        ([6], "names 6"),
        ([2, 1, 2], "names a layer twice"),
        ([], "empty"),
    ],
)
def test_impossible_taps_are_refused(taps: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_taps(taps, num_layers=6)
    assert check_taps([3, 0], num_layers=6) == (3, 0)


def test_tied_and_untied_heads_are_found(tmp_path: Path) -> None:
    tied = load(write_model(tmp_path / "tied", "qwen3"))
    assert tied.lm_head_VD.data_ptr() == tied.embedding_VD.data_ptr()
    untied = load(write_model(tmp_path / "untied", "llama"))
    assert untied.lm_head_VD.data_ptr() != untied.embedding_VD.data_ptr()
    assert untied.lm_head_VD.data_ptr() == untied.model.lm_head.weight.data_ptr()
    assert untied.vocab_size == 64
    assert untied.stop_ids == (2,)


def test_fp16_weights_become_bf16_and_rope_stays_fp32(tmp_path: Path) -> None:
    random_model("llama").half().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    target = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert target._trunk.rotary_emb.inv_freq.dtype == torch.float32  # noqa: SLF001
    with pytest.raises(ConfigError, match=r"bf16 or fp32, got torch.float16"):
        load(tmp_path, dtype=torch.float16)


def test_the_fingerprint_knows_the_weights_and_not_the_dtype(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", "llama", seed=0)
    prints = {load(folder, dtype=dtype).fingerprint for dtype in (torch.float32, torch.bfloat16)}
    assert len(prints) == 1
    other = load(write_model(tmp_path / "two", "llama", seed=1))
    assert other.fingerprint not in prints


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such file or folder") as caught:
        load(tmp_path / "absent")
    assert caught.value.exit_code == 3
    with pytest.raises(MissingError, match=r"no config\.json"):
        load(tmp_path)
    folder = write_model(tmp_path / "model", "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(MissingError, match=r"no \*\.safetensors"):
        load(folder)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        load(tmp_path / "model.bin")


def test_a_folder_without_a_weight_is_never_filled_with_random_numbers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 6
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"lacks 9 of the model's weights, first model\.layers\.5"
    ):
        load(folder)


def test_code_in_a_model_folder_is_not_run_unasked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="brings code of its own") as caught:
        load(folder)
    assert "target.trust_remote_code = true" in str(caught.value)
    assert not marker.exists()


def test_a_broken_config_is_one_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read: "):
        load(folder)


def hybrids() -> dict[str, tuple[str, Any]]:
    kinds = ["linear_attention", "full_attention"] * 2 + ["full_attention"]
    conv = ["conv", "full_attention"] * 2 + ["full_attention"]
    return {
        "qwen3_next": ("has linear_attention layers", {"layer_types": kinds}),
        "lfm2": ("has conv layers", {"layer_types": conv}),
        "mamba": ("has linear_attention layers|mixes tokens outside", {"state_size": 8}),
        "bloom": ("does not let its attention be replaced", {}),
    }


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "mamba", "bloom"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_layers_that_cannot_be_packed_are_refused(kind: str) -> None:
    reason, extra = hybrids()[kind]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **SMALL, **extra)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config)
    with pytest.raises(ConfigError, match=reason):
        Target(Loaded(model, None), taps=[0], device="cpu")


def test_a_layer_that_mixes_neighbours_in_secret_is_found_by_trying() -> None:
    model = random_model("llama")
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda _m, _i, out: out + out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="a document reads the one packed before it"):
        Target(Loaded(model, None), taps=[2], device="cpu")


def test_rope_that_depends_on_the_batch_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SMALL, rope_scaling=rope)
    assert rope_parameters(config)[0]["rope_type"] == "dynamic"
    auto: Any = transformers.AutoModelForCausalLM
    with pytest.raises(ConfigError, match="has dynamic RoPE"):
        Target(Loaded(auto.from_config(config), None), taps=[0], device="cpu")


def test_the_default_shape_follows_the_target(tmp_path: Path) -> None:
    target = load(write_model(tmp_path, "gemma3"))
    shape = default_shape(target, DrafterConfig(num_layers=2, block_size=8))
    assert shape.mask_token_id == 60 == len(target.tokenizer)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (32, 48, 64)
    assert shape.target_layer_ids == (0, 2)
    assert shape.rope_theta == 1_000_000.0
    changed = default_shape(target, DrafterConfig(num_heads=2, num_kv_heads=1, head_dim=16))
    assert (changed.num_heads, changed.num_kv_heads, changed.head_dim) == (2, 1, 16)


def test_the_mask_token_is_never_one_that_ends_or_pads(tmp_path: Path) -> None:
    target = load(write_model(tmp_path, "llama"))
    assert mask_token_id(target, 3) == 3
    for wrong, reason in ((2, "pads or ends text"), (0, "pads or ends text"), (64, "outside")):
        with pytest.raises(ConfigError, match=reason):
            mask_token_id(target, wrong)
    assert reserved_ids(target) == {3: "<reserved>"}
    target.vocab_size = 60  # a table without spare rows
    with pytest.raises(ConfigError, match="must be given") as caught:
        mask_token_id(target, None)
    assert "3 <reserved>" in str(caught.value)


def test_the_shipped_target_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dflash.target.loading.__file__", str(tmp_path / "loading.py"))
    with pytest.raises(MissingError, match="stdlib-lm is not part") as caught:
        resolve_source("stdlib-lm")
    assert "stdlib_lm_build" in str(caught.value)
    (tmp_path / "stdlib_lm").mkdir()
    assert resolve_source("stdlib-lm") == tmp_path / "stdlib_lm"


def write_gguf(path: Path) -> transformers.PreTrainedModel:
    """Write a random Llama as llama.cpp would, q and k rows in its own order; return the model."""
    gguf: Any = pytest.importorskip("gguf")
    model = random_model("llama")
    words = ["<pad>", "<s>", "</s>", "w", "3", "6", "w3", "w6", *[f"t{i}" for i in range(8, 64)]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    for add, value in (
        (writer.add_block_count, 5),
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 48),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, 8),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, 64),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, words),
        (writer.add_token_merges, ["w 3", "w 6"]),
        (writer.add_token_types, [3, 3, 3, *[1] * 61]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 0),
        (writer.add_chat_template, "{{ messages[0]['content'] }}"),
    ):
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 5)
    for name, weight in model.state_dict().items():
        data = weight.clone()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
                data = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_gives_the_same_logits_as_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    target = load(tmp_path / "tiny.gguf")
    tokens = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = model(tokens).logits, target.model(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert target.stop_ids == (2,)
    tokenizer = target.tokenizer
    assert tokenizer.chat_template is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer("w3").input_ids == [3, 4]  # letters and digits part, nothing is prepended
    assert load_tokenizer(tmp_path / "tiny.gguf")("w3").input_ids == [3, 4]
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_gguf_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingError, match="gguf package") as caught:
        load(tmp_path / "a.gguf")
    assert "pip install 'dflash-trainer[gguf]'" in str(caught.value)


def test_the_shipped_target_fits_its_budget_and_its_own_rules() -> None:
    folder = resolve_source("stdlib-lm")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    target = Target.load("stdlib-lm", taps=5, device="cpu", dtype=torch.float32)
    shape = default_shape(target, DrafterConfig())
    assert shape.mask_token_id == len(target.tokenizer) == 260
    assert target.taps == (1, 2, 3, 4, 5)
    assert target.stop_ids == (256, 258)
