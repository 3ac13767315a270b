"""Token rows on disk: shards of flat arrays in safetensors, read through a memory map."""

import hashlib
import json
import os
import struct
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dflash.data.encode import EncodedRow
from dflash.data.manifest import SHARD_NAMES, Manifest, ShardRecord, read_manifest
from dflash.errors import DataError

SHARD_BYTES = 64_000_000
_TOKEN_BYTES = 5  # int32 token and uint8 mask
_DTYPES = {"I32": np.int32, "I64": np.int64, "U8": np.uint8}
_COLUMNS = ("tokens", "loss_mask", "offsets", "sources", "lines")


class ShardWriter:
    """Collects rows and writes a shard whenever *shard_bytes* are full."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._rows: list[EncodedRow] = []
        self._bytes = 0
        self.shards: list[ShardRecord] = []
        self.num_supervised_tokens = 0

    def add(self, row: EncodedRow) -> None:
        """Take one row."""
        self._rows.append(row)
        self._bytes += len(row.tokens) * _TOKEN_BYTES
        self.num_supervised_tokens += int(row.loss_mask.sum(dtype=np.int64))
        if self._bytes >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected as one shard."""
        if not self._rows:
            return
        rows, self._rows, self._bytes = self._rows, [], 0
        lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        path = self._folder / SHARD_NAMES.replace("*", f"{len(self.shards):05d}")
        columns = {
            "tokens": np.concatenate([row.tokens for row in rows]),
            "loss_mask": np.concatenate([row.loss_mask for row in rows]),
            "offsets": np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
            "sources": np.array([row.source for row in rows], dtype=np.int32),
            "lines": np.array([row.line for row in rows], dtype=np.int64),
        }
        beside = path.with_suffix(".partial")
        try:
            save_file(columns, beside)
            make_readable(beside)
        except SafetensorError as error:  # how safetensors says that the disk is full
            raise DataError(f"{path}: cannot be written ({error})") from error
        beside.replace(path)
        self.shards.append(
            ShardRecord(
                file=path.name,
                num_rows=len(rows),
                num_tokens=int(lengths.sum()),
                num_bytes=path.stat().st_size,
                sha256=file_sha256(path),
            )
        )


def make_readable(path: Path) -> None:
    """Give a file the mode that any new file gets; safetensors leaves it to its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


class TokenDataset:
    """Rows of a prepared data set, by number; tokens stay on disk until asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shards = [_map_shard(folder / record.file, record) for record in manifest.shards]
        counts = [record.num_rows for record in manifest.shards]
        self._first_rows = [0, *np.cumsum(counts).tolist()]
        self.lengths: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(shard["offsets"]) for shard in self._shards)]
        )

    @classmethod
    def open(cls, folder: Path) -> "TokenDataset":
        """Open a prepared folder.

        Raises:
            DataError: it is not one, or it is damaged.
        """
        return cls(folder, read_manifest(folder))

    def verify(self) -> None:
        """Compare every byte with the sums in the manifest.

        Raises:
            DataError: a shard is not what was written.
        """
        for record in self.manifest.shards:
            path = self.folder / record.file
            if file_sha256(path) != record.sha256:
                raise DataError(
                    f"{path}: damaged shard, its sha256 is not the manifest's",
                    hint="prepare the data again",
                )

    @property
    def stats(self) -> Manifest:
        """Counts, sources and dropped rows, as the manifest holds them."""
        return self.manifest

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return (tokens, loss mask) of a row as views of the file."""
        shard, at = self._place(index)
        start, stop = shard["offsets"][at : at + 2].tolist()
        return shard["tokens"][start:stop], shard["loss_mask"][start:stop].view(np.bool_)

    def source_of(self, index: int) -> str:
        """Return where the row was read, as file:line."""
        shard, at = self._place(index)
        name = self.manifest.sources[int(shard["sources"][at])].name
        return f"{name}:{int(shard['lines'][at])}"

    def _place(self, index: int) -> tuple[dict[str, Any], int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect_right(self._first_rows, index) - 1
        return self._shards[shard], index - self._first_rows[shard]


def _map_shard(path: Path, record: ShardRecord) -> dict[str, NDArray[Any]]:
    """Map the columns of a shard; the small ones are read, so that only tokens stay on disk."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise DataError(
                f"{path}: {num_bytes} bytes, the manifest says {record.num_bytes}",
                hint="prepare the data again",
            )
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)
        columns = {name: _column(data, header[name]) for name in _COLUMNS}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (struct.error, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged shard", hint="prepare the data again") from error
    kept = {name: np.array(columns[name]) for name in ("offsets", "sources", "lines")}
    return {**columns, **kept}


def _column(data: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    return np.asarray(data)[start:stop].view(_DTYPES[entry["dtype"]])
