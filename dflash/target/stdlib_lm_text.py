"""Tokenizer and training text of the shipped target: byte-level, standard-library source.

Token ids 0-255 are the byte values themselves, so a file's tokens are its bytes. A share of the
text is written as conversations (a function's docstring asks, its source answers), so that the
chat template, its end-of-turn token and sampled user turns mean something to the model.
"""

import ast
import hashlib
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_OF_TEXT, TURN_START, TURN_END, PAD = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_ROWS = 272
"""Rows of the embedding table: 260 tokens, then spare rows; the first spare one is the mask."""

MAX_CHAT_BYTES = 1000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level tokenizer."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(NUM_BYTES)]


def byte_tokenizer() -> Tokenizer:
    """Build the byte-level tokenizer: no merges, ids equal to byte values, four special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4.57 and 5 both read."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[3],
        "additional_special_tokens": list(SPECIAL_TOKENS[1:3]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class Corpus:
    """One split as one flat row of token ids, each document ended by end-of-text.

    Attributes:
        tokens: int16, all documents one after another.
        starts: int64, where documents begin; whole files are listed repeatedly so that a uniform
            choice falls on a file as often as on one of the more numerous conversations.
        sha256: hash of the tokens.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        rows: list[NDArray[np.int16]] = []
        starts: dict[bool, list[int]] = {False: [], True: []}
        num_tokens = 0
        for tokens in (row for path in files for row in _documents(path)):
            starts[int(tokens[0]) == TURN_START].append(num_tokens)
            rows.append(tokens)
            num_tokens += len(tokens)
        repeats = max(1, len(starts[True]) // max(1, len(starts[False])))
        self.tokens = np.concatenate(rows)
        self.starts = np.array(starts[False] * repeats + starts[True], dtype=np.int64)
        self.sha256 = hashlib.sha256(self.tokens.tobytes()).hexdigest()


def _documents(path: Path) -> Iterator[NDArray[np.int16]]:
    """Yield the file, then the conversations made from it."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:  # a handful of files declare another encoding
        return
    if not text.strip():
        return
    yield np.append(np.frombuffer(data, dtype=np.uint8).astype(np.int16), np.int16(END_OF_TEXT))
    for question, answer in _conversations(text):
        yield _chat_tokens(question, answer)


def _conversations(text: str) -> Iterator[tuple[str, str]]:
    """Yield (first docstring line and name, source) of the short documented functions."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # templates that are not programs
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source.encode()) <= MAX_CHAT_BYTES:
                yield f"{docstring.splitlines()[0].strip()} ({node.name})", source


def _chat_tokens(question: str, answer: str) -> NDArray[np.int16]:
    row: list[int] = []
    for role, content in (("user", question), ("assistant", answer)):
        row += [TURN_START, *f"{role}\n{content}".encode(), TURN_END, ord("\n")]
    return np.array([*row, END_OF_TEXT], dtype=np.int16)
