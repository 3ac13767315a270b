"""What a prepared data set says about itself: ``manifest.json`` beside its shards."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash.errors import DataError

MANIFEST_NAME = "manifest.json"
SHARD_NAMES = "tokens-*.safetensors"
FORMAT = "dflash-tokens"
VERSION = 1
MAX_LISTED_ROWS = 10_000
"""Dropped rows beyond this many are counted, not listed."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceRecord(_Record):
    """One file that was read."""

    name: str
    kind: str
    sha256: str
    num_rows: int


class DroppedRow(_Record):
    """One row that was not used: ``place`` is file:line."""

    place: str
    reason: str
    detail: str


class ShardRecord(_Record):
    """One shard file."""

    file: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    sha256: str


class Counts(_Record):
    """What became of the rows that were read. A text row may become several token rows."""

    num_rows_read: int
    num_dropped_rows: int
    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    num_cut_rows: int = 0
    num_cut_tokens: int = 0
    num_unsupervised_turns: int = 0

    @property
    def supervised_share(self) -> float:
        """Supervised tokens / tokens."""
        return self.num_supervised_tokens / max(self.num_tokens, 1)

    @property
    def bad_share(self) -> float:
        """Dropped rows / rows read."""
        return self.num_dropped_rows / max(self.num_rows_read, 1)


class Manifest(_Record):
    """All that is known of a prepared data set; ``key`` is the hash of what decides its tokens."""

    format: str = FORMAT
    version: int = VERSION
    key: str
    tokenizer_sha256: str
    template_sha256: str
    vocab_size: int
    max_document_tokens: int
    sources: list[SourceRecord]
    counts: Counts
    dropped: dict[str, int] = Field(description="dropped rows by reason")
    dropped_rows: list[DroppedRow]
    shards: list[ShardRecord]

    def write(self, folder: Path) -> None:
        """Write it into *folder*, beside and then renamed."""
        beside = folder / f"{MANIFEST_NAME}.partial"
        beside.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        beside.replace(folder / MANIFEST_NAME)


def is_prepared(folder: Path) -> bool:
    """Tell whether *folder* holds a prepared data set, of any version or damaged."""
    try:
        value = json.loads((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return False
    except ValueError:
        return any(folder.glob(SHARD_NAMES))
    return isinstance(value, dict) and value.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of *folder*.

    Raises:
        DataError: there is none, it is damaged, or it has another version.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
        version = json.loads(text).get("version")
        if version != VERSION:
            raise DataError(
                f"{path}: version {version} of the format, this program reads version {VERSION}",
                hint="prepare the data again",
            )
        return Manifest.model_validate_json(text)
    except OSError as error:
        raise DataError(
            f"{folder}: no prepared data set there ({MANIFEST_NAME}: {error.strerror})",
            hint="dflash data prepare SOURCES --tokenizer FOLDER --out FOLDER",
        ) from error
    except (ValidationError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: damaged manifest", hint="prepare the data again") from error
