"""Raw rows -> token ids and loss mask, in batches; every rule about a row's tokens is here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.chat import ChatTemplate, Rendered, require_offsets
from dflash.data.packing import MIN_PIECE_TOKENS
from dflash.data.rows import Conversation, Dropped, RawRow, RowError, Text, Tokens

_BLANK_MARKS = ("Ġ", "▁")  # byte-level and sentencepiece write a leading space like this


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row of the data set: int32 tokens, uint8 loss mask (1 = supervised), its place."""

    source: int
    line: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(slots=True)
class EncodeCounts:
    """What was left out of rows that were kept."""

    num_cut_rows: int = 0
    num_cut_tokens: int = 0
    num_unsupervised_turns: int = 0


@dataclass(slots=True)
class Encoder:
    """Turns raw rows into token rows with one tokenizer.

    A text longer than ``max_document_tokens`` is split into consecutive rows; a conversation or
    pre-tokenised row is cut at the end, and dropped when nothing supervised is left.
    """

    tokenizer: Any
    vocab_size: int
    max_document_tokens: int
    counts: EncodeCounts = field(default_factory=EncodeCounts)
    _template: ChatTemplate | None = None

    def __post_init__(self) -> None:
        require_offsets(self.tokenizer)

    def encode(self, rows: Sequence[RawRow]) -> Iterator[EncodedRow | Dropped]:
        """Yield the token rows of *rows* in order; a text may become several."""
        located: dict[int, Rendered] = {}
        refused: dict[int, RowError] = {}
        for index, row in enumerate(rows):
            if isinstance(row.content, Conversation) and not self._chat.has_generation_tags:
                try:
                    located[index] = self._chat.locate(row.content)
                except RowError as error:
                    refused[index] = error
        texts = {index: rendered.text for index, rendered in located.items()}
        chats = dict(zip(texts, self._tokenise(texts.values(), specials=False), strict=True))
        plain = {i: row.content.text for i, row in enumerate(rows) if isinstance(row.content, Text)}
        documents = dict(zip(plain, self._tokenise(plain.values(), specials=True), strict=True))
        for index, row in enumerate(rows):
            try:
                if isinstance(row.content, Text):
                    yield from self._text_rows(row, row.content, documents[index])
                elif isinstance(row.content, Tokens):
                    yield self._finish(row, row.content.input_ids, row.content.loss_mask)
                elif index in refused:
                    raise refused[index]
                elif index in located:
                    yield self._chat_row(row, located[index], chats[index])
                else:
                    yield self._finish(row, *self._chat.tagged_mask(row.content))
            except RowError as error:
                yield Dropped(row.source, row.line, error.reason, error.detail)

    @property
    def _chat(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer)
        return self._template

    def _tokenise(self, texts: Iterable[str], *, specials: bool) -> Iterator[Any]:
        """Yield the encoding of each text.

        The backend is asked directly: transformers would turn every offset into a Python list,
        which takes longer than the tokenising, and for a text only a few of them are needed.
        """
        batch = list(texts)
        if not batch:
            return
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may carry either
        backend.no_padding()
        yield from backend.encode_batch(batch, add_special_tokens=specials)

    def _chat_row(
        self,
        row: RawRow,
        rendered: Rendered,
        encoded: Any,  # noqa: ANN401  # tokenizers is untyped
    ) -> EncodedRow:
        ids: list[int] = encoded.ids
        finished = self._finish(row, ids, self._mask(ids, encoded.offsets, rendered.spans))
        self.counts.num_unsupervised_turns += rendered.num_unsupervised_turns
        return finished

    def _mask(
        self, ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]
    ) -> NDArray[np.uint8]:
        """Supervise the tokens that begin inside a span.

        A token that begins before a span holds text of the header too: the target was given it. A
        tokenizer may report such a token without its leading space, so the first tokens of a span
        are looked at by name.
        """
        starts = np.array([start for start, _ in offsets], dtype=np.int64)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, stop in spans:
            first, last = np.searchsorted(starts, [start, stop]).tolist()
            while 0 < first < last and offsets[first - 1][1] < start:
                name = self.tokenizer.convert_ids_to_tokens(ids[first])
                if not name.startswith(_BLANK_MARKS):
                    break
                first += 1
            mask[first:last] = 1
        return mask

    def _finish(
        self, row: RawRow, ids: Sequence[int], mask: Sequence[int] | NDArray[np.uint8]
    ) -> EncodedRow:
        tokens = self._checked_tokens(ids)
        loss_mask = np.asarray(mask, dtype=np.uint8)
        if not loss_mask.any():
            raise RowError("nothing_supervised")
        limit = self.max_document_tokens
        if not can_anchor(loss_mask):
            raise RowError("too_short")
        if len(tokens) > limit:
            if not can_anchor(loss_mask[:limit]):
                raise RowError("cut_away", f"{limit} of {len(tokens)} tokens are kept")
            self.counts.num_cut_rows += 1
            self.counts.num_cut_tokens += len(tokens) - limit
        return EncodedRow(row.source, row.line, tokens[:limit], loss_mask[:limit])

    def _checked_tokens(self, ids: Sequence[int]) -> NDArray[np.int32]:
        worst = max(ids, default=0)
        lowest = min(ids, default=0)
        if lowest < 0 or worst >= self.vocab_size:
            bad = lowest if lowest < 0 else worst
            raise RowError(
                "token_out_of_vocabulary",
                f"{bad} of {self.vocab_size}",
            )
        return np.array(ids, dtype=np.int32)

    def _text_rows(
        self,
        row: RawRow,
        document: Text,
        encoded: Any,  # noqa: ANN401  # tokenizers is untyped
    ) -> Iterator[EncodedRow]:
        tokens = self._checked_tokens(encoded.ids)
        if len(tokens) < MIN_PIECE_TOKENS:
            raise RowError("too_short", f"{len(tokens)} tokens")
        line, seen = row.line, 0
        for start in range(0, len(tokens), self.max_document_tokens):
            piece = tokens[start : start + self.max_document_tokens]
            if len(piece) < MIN_PIECE_TOKENS:
                self.counts.num_cut_tokens += len(piece)
                break
            if document.is_file and start:  # say where in it the piece begins
                begins = max((encoded.token_to_chars(start) or (seen,))[0], seen)
                line += document.text.count("\n", seen, begins)
                seen = begins
            yield EncodedRow(row.source, line, piece, np.ones(len(piece), dtype=np.uint8))


def can_anchor(loss_mask: NDArray[np.uint8]) -> bool:
    """Tell whether two adjacent tokens, the first not at position 0, are supervised."""
    return bool((loss_mask[1:-1] & loss_mask[2:]).any())
