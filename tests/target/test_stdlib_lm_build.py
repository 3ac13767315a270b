"""The shipped target can be rebuilt: its text, its tokenizer, its folder."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from dflash.data import stdlib
from dflash.errors import MissingError, UsageError
from dflash.target import stdlib_lm_build, stdlib_lm_text

SOURCE = '''def area(width, height):
    """Return the area.

    Of a rectangle.
    """
    return width * height
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for number in range(60):
        path = root / f"part{number % 3}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE + f"\n# file {number}\n", encoding="utf-8")
    (root / "test").mkdir()
    (root / "test" / "skipped.py").write_text("x = 1\n", encoding="utf-8")
    return root


def test_the_two_splits_are_disjoint_and_follow_the_hash(library: Path) -> None:
    train = stdlib.stdlib_files("train", root=library)
    heldout = stdlib.stdlib_files("heldout", root=library)
    both = stdlib.stdlib_files("all", root=library)
    assert sorted(train + heldout) == sorted(both)
    assert len(both) == 60
    for path in both:
        digest = hashlib.sha256(str(path.relative_to(library).as_posix()).encode()).digest()
        assert (path in heldout) == (int.from_bytes(digest, "big") % 20 == 0)


def test_the_running_interpreter_has_both_splits() -> None:
    assert len(stdlib.stdlib_files("train")) > len(stdlib.stdlib_files("heldout")) > 5


def test_a_wrong_split_or_an_empty_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stdlib:tset"):
        stdlib.stdlib_files("tset")  # type: ignore[arg-type]
    with pytest.raises(MissingError, match="no Python source"):
        stdlib.stdlib_files("all", root=tmp_path)


def test_token_ids_are_byte_values_and_special_tokens_follow() -> None:
    tokenizer = stdlib_lm_text.byte_tokenizer()
    text = "a = 'é你'\r\n\tb\0"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_end|>").ids == [258]
    assert tokenizer.get_vocab_size() == 260


def test_a_documented_function_also_becomes_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "area.py"
    path.write_text(SOURCE, encoding="utf-8")
    corpus = stdlib_lm_text.Corpus([path])
    text = bytes(int(t) if t < 256 else ord("#") for t in corpus.tokens).decode()
    assert text == (
        SOURCE + "#" + "#user\nReturn the area. (area)#\n#assistant\n" + SOURCE.rstrip() + "#\n#"
    )
    assert corpus.starts.tolist() == [0, len(SOURCE) + 1]
    assert int(corpus.tokens[-1]) == stdlib_lm_text.END_OF_TEXT


def test_the_builder_writes_a_folder_that_transformers_loads(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdlib, "stdlib_root", lambda: library)
    out = tmp_path / "built"
    words = f"--out {out} --steps 2 --device cpu --batch-sequences 2 --sequence-tokens 32"
    stdlib_lm_build.main(words.split())
    assert sum(path.stat().st_size for path in out.iterdir()) < stdlib_lm_build.MAX_FOLDER_BYTES
    model = Qwen3ForCausalLM.from_pretrained(out, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [256, 258]
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 4e6
    assert len(tokenizer) == 260 < model.config.vocab_size
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == 10000.0  # version 5 alone would write rope_parameters only
    provenance = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["history"][-1]["heldout_nats"] < provenance["history"][0]["heldout_nats"]
    with pytest.raises(UsageError, match="does not overwrite"):
        stdlib_lm_build.save(model, out, {})


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    settings = stdlib_lm_build.BuildSettings(lr=1.0, warmup_share=0.1)
    rates = [stdlib_lm_build.learning_rate(settings, k / 20) for k in range(21)]
    assert rates.index(max(rates)) == 2
    assert rates[-1] == 0.0
