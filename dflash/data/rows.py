"""Raw rows of a source file, each judged for its form only; tokens come later.

A row that is merely bad becomes a :class:`Dropped` with its place and one of ``REASONS``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash.data.sources import SourceFile
from dflash.errors import DataError, MissingError

REASONS = {
    "invalid_json": "not valid JSON",
    "not_utf8": "not UTF-8 text",
    "unknown_format": "no messages, conversations, input_ids with loss_mask, or text",
    "bad_message": "a message without a known role or without text",
    "no_assistant_turn": "no assistant turn",
    "template_error": "the chat template refused it",
    "rewritten_turns": "the template rewrites every assistant turn, so none can be located",
    "nothing_supervised": "no supervised token",
    "too_short": "no two adjacent supervised tokens after the first position",
    "cut_away": "no supervised token left within max_document_tokens",
    "mask_length": "loss_mask and input_ids differ in length",
    "bad_tokens": "input_ids or loss_mask are not lists of whole numbers (mask: 0 or 1)",
    "token_out_of_vocabulary": "a token id outside the vocabulary",
}
"""Every reason for which a row is dropped, and what it says."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PARQUET_BATCH_ROWS = 256

Message = dict[str, Any]


class RowError(Exception):
    """A row is bad for one of ``REASONS``; never leaves dflash.data."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = REASONS[reason] + f": {detail}" * bool(detail)


class Dropped(NamedTuple):
    """A row that is not used: where it stands and why."""

    source: int
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the {role, content} form."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that is tokens already."""

    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, slots=True)
class Text:
    """A document in which every token is supervised; ``is_file`` when it is all of its file."""

    text: str
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as read; ``source`` numbers the file, ``line`` counts from 1."""

    source: int
    line: int
    content: Conversation | Tokens | Text


def read_rows(source: int, file: SourceFile, *, tokenizer_hash: str) -> Iterator[RawRow | Dropped]:
    """Yield the rows of *file*, the file's number being *source*.

    Raises:
        DataError: the file cannot be read.
        MissingError: a parquet file without pyarrow.
    """
    reader = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text}[file.kind]
    try:
        for line, value in reader(file):
            try:
                if isinstance(value, RowError):
                    raise value
                if not isinstance(value, Text):
                    value = parse_row(value, tokenizer_hash=tokenizer_hash)  # noqa: PLW2901
                yield RawRow(source, line, value)
            except RowError as error:
                yield Dropped(source, line, error.reason, error.detail)
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({error.strerror or error})") from error


def _read_jsonl(file: SourceFile) -> Iterator[tuple[int, Any]]:
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parse_line(line, first=number == 1)


def _parse_line(line: bytes, *, first: bool) -> Any:  # noqa: ANN401  # JSON is any value
    try:
        return json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return RowError("not_utf8", f"{error.reason} at byte {error.start}")
    except (json.JSONDecodeError, RecursionError) as error:
        return RowError("invalid_json", str(error))


def _read_parquet(file: SourceFile) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingError(
            f"{file.name}: reading parquet needs pyarrow",
            hint="pip install 'dflash-trainer[parquet]'",
        ) from error
    number = 0
    try:
        for batch in pq.ParquetFile(file.path).iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                # A column of another row kind is null here, which is the same as not there.
                yield number, {key: value for key, value in row.items() if value is not None}
    except pa.ArrowException as error:
        raise DataError(f"{file.name}: not a readable parquet file ({error})") from error


def _read_text(file: SourceFile) -> Iterator[tuple[int, Any]]:
    try:
        yield 1, Text(file.path.read_bytes().decode("utf-8-sig"), is_file=True)
    except UnicodeDecodeError as error:
        yield 1, RowError("not_utf8", f"{error.reason} at byte {error.start}")


def parse_row(row: Any, *, tokenizer_hash: str) -> Conversation | Tokens | Text:  # noqa: ANN401  # JSON is any value
    """Recognise the form of a row.

    A row that holds tokens and messages, and says by ``tokenizer`` which tokenizer made the tokens,
    is read as tokens for that tokenizer and as messages for any other.

    Raises:
        RowError: it has no form that is known.
    """
    if not isinstance(row, dict):
        kind = "null" if row is None else f"a JSON {JSON_NAMES[type(row)]}"
        raise RowError("unknown_format", f"{kind} instead of an object")
    if "input_ids" in row and row.get("tokenizer", tokenizer_hash) == tokenizer_hash:
        return _tokens(row)
    if "messages" in row:
        return Conversation(_messages(row["messages"]), row.get("tools") or None)
    if "conversations" in row:
        return Conversation(_sharegpt(row["conversations"]), row.get("tools") or None)
    if isinstance(row.get("text"), str):
        return Text(row["text"])
    raise RowError("unknown_format")


def _tokens(row: dict[str, Any]) -> Tokens:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise RowError("bad_tokens", "no loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise RowError("bad_tokens")
    if len(ids) != len(mask):
        raise RowError("mask_length", f"{len(ids)} input_ids but {len(mask)} loss_mask values")
    if not all(type(token) is int for token in ids) or not all(m in (0, 1) for m in mask):
        raise RowError("bad_tokens")
    return Tokens(ids, [int(m) for m in mask])


def _messages(value: Any) -> list[Message]:  # noqa: ANN401  # JSON is any value
    if not isinstance(value, list) or not value:
        raise RowError("bad_message", "messages is not a list of messages")
    return [_message(message, number) for number, message in enumerate(value, start=1)]


def _message(message: Any, number: int) -> Message:  # noqa: ANN401  # JSON is any value
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else None
        has = "no role" if role is None else f"the role {json.dumps(role, ensure_ascii=False)}"
        raise RowError("bad_message", f"message {number} has {has}")
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("content", "" if "tool_calls" in kept else None), str):
        raise RowError("bad_message", f"message {number} has no text content")
    return {"content": "", **kept}


def _sharegpt(value: Any) -> list[Message]:  # noqa: ANN401  # JSON is any value
    if not isinstance(value, list) or not value:
        raise RowError("bad_message", "conversations is not a list of messages")
    messages = []
    for number, turn in enumerate(value, start=1):
        role = SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise RowError("bad_message", f"turn {number} has no known from, or no text value")
        messages.append({"role": role, "content": turn["value"]})
    return messages
