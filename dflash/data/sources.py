"""From the words a user writes (files, folders, ``stdlib:train``) to a list of files to read."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from dflash.data.stdlib import Split, stdlib_files, stdlib_root
from dflash.errors import DataError

SourceKind = Literal["jsonl", "parquet", "text"]

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TEXT_SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("py", "pyi", "txt", "md", "rst", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "js", "ts"),
        *("tsx", "go", "rs", "java", "kt", "rb", "lua", "sh", "sql", "html", "css", "toml"),
        *("yaml", "yml", "tex"),
    )
)
STDLIB_WORD = "stdlib"
_SNIFFED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read; ``name`` is how messages and the manifest call it."""

    path: Path
    name: str
    kind: SourceKind


def find_sources(sources: Sequence[str | Path]) -> list[SourceFile]:
    """List the files behind *sources*, in their order; folders in sorted order.

    Raises:
        DataError: a source does not exist, cannot be read, is binary, or holds nothing to read.
    """
    found = [file for source in sources for file in _find(source)]
    if not found:
        raise DataError("no data source was given", hint="name a file, a folder or stdlib:train")
    return found


def _find(source: str | Path) -> list[SourceFile]:
    word, _, split = str(source).partition(":")
    if word == STDLIB_WORD and not Path(source).exists():
        files = stdlib_files(cast("Split", split or "train"))
        names = [f"stdlib/{path.relative_to(stdlib_root()).as_posix()}" for path in files]
        return [
            SourceFile(path, name, "text")
            for path, name in zip(files, names, strict=True)
            if path.stat().st_size
        ]
    path = Path(source).expanduser()
    if path.is_dir():
        files_below = [SourceFile(file, file.as_posix(), _kind(file)) for file in _walk(path)]
        if not files_below:
            raise DataError(f"{path}: no file with a known ending below this folder")
        return files_below
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder", hint="paths are relative to the current folder"
        )
    return [SourceFile(path, path.as_posix(), _explicit_kind(path))]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield readable files below *folder*; links are followed, each real folder once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = str(Path(root).resolve())
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file() and _is_listed(path):
                yield path


def _is_listed(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix in JSONL_SUFFIXES or suffix == ".parquet":
        return True
    return suffix in TEXT_SUFFIXES and path.stat().st_size > 0 and not _is_binary(path)


def _kind(path: Path) -> SourceKind:
    suffix = path.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "text"


def _explicit_kind(path: Path) -> SourceKind:
    if path.suffix.lower() == ".json":
        raise DataError(
            f"{path}: a .json file is not read, one JSON object a line is",
            hint="write the rows as .jsonl",
        )
    kind = _kind(path)
    if kind == "text" and _is_binary(path):
        raise DataError(f"{path}: a binary file is neither text, JSONL nor parquet")
    return kind


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
