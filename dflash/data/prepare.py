"""Sources -> a prepared data set: read, tokenise, write shards, count what was dropped."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.data.chat import template_text, tokenizer_hash
from dflash.data.encode import Encoder
from dflash.data.manifest import (
    FORMAT,
    MANIFEST_NAME,
    MAX_LISTED_ROWS,
    VERSION,
    Counts,
    DroppedRow,
    Manifest,
    SourceRecord,
    is_prepared,
    read_manifest,
)
from dflash.data.packing import MIN_PIECE_TOKENS
from dflash.data.rows import REASONS, Dropped, RawRow, Text, read_rows
from dflash.data.shards import ShardWriter, TokenDataset, file_sha256
from dflash.data.sources import SourceFile, find_sources
from dflash.errors import DataError

_BATCH_ROWS = 256
_BATCH_CHARACTERS = 4_000_000
_NAMED_PLACES = 5


def prepare(
    sources: Sequence[str | Path],
    out: Path,
    *,
    tokenizer: Any,  # noqa: ANN401  # transformers is untyped
    max_document_tokens: int,
    max_bad_share: float,
    vocab_size: int,
) -> TokenDataset:
    """Turn *sources* into a prepared data set in the folder *out*.

    An equal preparation that is already there is reused; an older one of ours is replaced. One
    source that is itself a prepared folder is opened as it is, if tokenizer and sizes agree.

    Args:
        sources: files, folders, "stdlib:train", "stdlib:heldout".
        out: the folder to write; it appears only when it is complete.
        tokenizer: a fast transformers tokenizer.
        max_document_tokens: longer text is split, longer conversations are cut.
        max_bad_share: dropped rows / rows read above which nothing is written.
        vocab_size: rows of the target's embedding table.

    Raises:
        DataError: a source cannot be read, no row is left, or too many rows are bad.
    """
    if max_document_tokens < MIN_PIECE_TOKENS:
        raise DataError(
            f"max_document_tokens is {max_document_tokens}, at least {MIN_PIECE_TOKENS} are needed"
        )
    encoder = Encoder(tokenizer, vocab_size, max_document_tokens)
    if len(sources) == 1 and is_prepared(Path(sources[0])):
        return _opened(Path(sources[0]), encoder, max_bad_share=max_bad_share)
    work = _Preparation.of(find_sources(sources), encoder)
    if is_prepared(out):
        existing = _existing(out, key=work.key)
        if existing is not None:
            return _accepted(existing, max_bad_share=max_bad_share)
    require_ours(out)
    return work.write(out, max_bad_share=max_bad_share)


def _existing(out: Path, *, key: str) -> TokenDataset | None:
    """The preparation *key* that is in *out* already, looked over; None for any other."""
    with suppress(OSError, ValueError):  # that it is damaged is for reading it to say
        if json.loads((out / MANIFEST_NAME).read_bytes()).get("version") != VERSION:
            return None
    try:
        if read_manifest(out).key != key:
            return None
        existing = TokenDataset.open(out)
        existing.verify()
    except DataError as error:
        hint = f"remove the folder {out}: the same command prepares it again"
        raise DataError(error.what, hint=hint) from error
    return existing


def require_ours(out: Path) -> None:
    """Check that nothing is at *out* but a prepared data set or an empty folder.

    Raises:
        DataError: there is.
    """
    if is_prepared(out) or not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    raise DataError(f"{out}: exists and is no prepared data set", hint="choose another folder")


def _opened(folder: Path, encoder: Encoder, *, max_bad_share: float) -> TokenDataset:
    dataset = TokenDataset.open(folder)
    manifest = dataset.manifest
    if manifest.tokenizer_sha256 != tokenizer_hash(encoder.tokenizer):
        raise DataError(f"{folder}: was prepared with another tokenizer")
    if manifest.vocab_size > encoder.vocab_size:
        raise DataError(
            f"{folder}: was prepared for a vocabulary of {manifest.vocab_size}, the target has"
            f" {encoder.vocab_size}"
        )
    return _accepted(dataset, max_bad_share=max_bad_share)


def _accepted(dataset: TokenDataset, *, max_bad_share: float) -> TokenDataset:
    manifest = dataset.manifest
    _check_share(manifest.counts, manifest.dropped, manifest.dropped_rows, limit=max_bad_share)
    return dataset


@dataclass(slots=True)
class _Preparation:
    """One preparation in progress."""

    files: list[SourceFile]
    encoder: Encoder
    hashes: list[str]
    identity: dict[str, Any]
    key: str
    rows_read: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    listed: list[DroppedRow] = field(default_factory=list)

    @classmethod
    def of(cls, files: list[SourceFile], encoder: Encoder) -> "_Preparation":
        template = template_text(encoder.tokenizer).encode()
        hashes = [file_sha256(file.path) for file in files]
        identity = {
            "tokenizer_sha256": tokenizer_hash(encoder.tokenizer),
            "template_sha256": hashlib.sha256(template).hexdigest(),
            "vocab_size": encoder.vocab_size,
            "max_document_tokens": encoder.max_document_tokens,
        }
        contents = [(file.kind, digest) for file, digest in zip(files, hashes, strict=True)]
        text = json.dumps([FORMAT, VERSION, contents, identity], sort_keys=True)
        return cls(files, encoder, hashes, identity, hashlib.sha256(text.encode()).hexdigest())

    def write(self, out: Path, *, max_bad_share: float) -> TokenDataset:
        beside = out.with_name(f"{out.name}.partial-{os.getpid()}")
        try:
            beside.mkdir(parents=True)
            writer = ShardWriter(beside)
            for batch in _batches(self._raw_rows()):
                for row in self.encoder.encode(batch):
                    if isinstance(row, Dropped):
                        self._drop(row)
                    else:
                        writer.add(row)
            writer.flush()
            manifest = self._manifest(writer)
            counts = manifest.counts
            if counts.num_rows == 0:
                raise _empty(self.files, manifest)
            _check_share(counts, manifest.dropped, manifest.dropped_rows, limit=max_bad_share)
            manifest.write(beside)
            _move_into_place(beside, out)
        except OSError as error:
            raise DataError(f"{out}: cannot be written ({error.strerror or error})") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return TokenDataset.open(out)

    def _raw_rows(self) -> Iterator[RawRow]:
        for source, file in enumerate(self.files):
            rows = read_rows(source, file, tokenizer_hash=self.identity["tokenizer_sha256"])
            for row in rows:
                self.rows_read[source] += 1
                if isinstance(row, Dropped):
                    self._drop(row)
                else:
                    yield row

    def _drop(self, row: Dropped) -> None:
        self.reasons[row.reason] += 1
        if len(self.listed) < MAX_LISTED_ROWS:
            place = f"{self.files[row.source].name}:{row.line}"
            self.listed.append(DroppedRow(place=place, reason=row.reason, detail=row.detail))

    def _manifest(self, writer: ShardWriter) -> Manifest:
        return Manifest(
            key=self.key,
            **self.identity,
            sources=[
                SourceRecord(
                    name=file.name, kind=file.kind, sha256=digest, num_rows=self.rows_read[number]
                )
                for number, (file, digest) in enumerate(zip(self.files, self.hashes, strict=True))
            ],
            counts=Counts(
                num_rows_read=self.rows_read.total(),
                num_dropped_rows=self.reasons.total(),
                num_rows=sum(shard.num_rows for shard in writer.shards),
                num_tokens=sum(shard.num_tokens for shard in writer.shards),
                num_supervised_tokens=writer.num_supervised_tokens,
                **asdict(self.encoder.counts),
            ),
            dropped=dict(self.reasons.most_common()),
            dropped_rows=self.listed,
            shards=writer.shards,
        )


def _batches(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Group rows for the tokenizer: many short ones, or a few megabytes of text."""
    batch: list[RawRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.content.text) if isinstance(row.content, Text) else 0
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_share(
    counts: Counts, reasons: dict[str, int], listed: list[DroppedRow], *, limit: float
) -> None:
    if counts.num_dropped_rows and counts.bad_share > limit:
        raise DataError(
            f"{counts.num_dropped_rows} of {counts.num_rows_read} rows are bad"
            f" ({counts.bad_share:.1%}, data.max_bad_share is {limit:.1%}):"
            f" {_reasons(reasons)}; first: {_places(listed)}",
            hint="mend the rows, or raise data.max_bad_share",
        )


def _empty(files: list[SourceFile], manifest: Manifest) -> DataError:
    names = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    if not manifest.counts.num_rows_read:
        return DataError(f"{names}: the data set is empty")
    return DataError(
        f"{names}: none of {manifest.counts.num_rows_read} rows can be used:"
        f" {_reasons(manifest.dropped)}; first: {_places(manifest.dropped_rows)}"
    )


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} x {REASONS[reason]}" for reason, count in reasons.items())


def _places(listed: list[DroppedRow]) -> str:
    return "; ".join(f"{row.place} ({row.detail})" for row in listed[:_NAMED_PLACES])


def _move_into_place(beside: Path, out: Path) -> None:
    """Rename *beside* to *out*; what was there of ours goes only when the new one is in place."""
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)
