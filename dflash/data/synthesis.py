"""A folder of conversations that the target wrote: its shards, and the state that lists them.

A shard is renamed in when complete, and listed after that. The last one may be cut to the number of
rows that was asked for; all of its rows then lie beside it, for a call that asks for more.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash.errors import DataError

STATE_NAME = "synthesis.json"
WHOLE = ".whole"
"""Ends the name of a file with all rows of a shard that was cut."""

NOT_ASKED_FOR = "more than asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisSettings:
    """What decides the text; a folder belongs to one set of these."""

    source: str
    stop_ids: tuple[int, ...]
    batch_size: int = 64
    max_user_tokens: int = 128
    max_answer_tokens: int = 512
    temperature: float = 1.0
    answer_temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    text_share: float = 0.0
    text_sha256: str = ""


@dataclass(frozen=True, slots=True)
class SynthesisShard:
    """One finished shard: rows kept, rows drawn, dropped rows by reason, and its seed."""

    file: str
    seed: int
    num_rows: int
    num_drawn: int
    dropped: dict[str, int]


@dataclass(slots=True)
class Synthesis:
    """What a folder holds so far."""

    settings: SynthesisSettings
    shards: list[SynthesisShard] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Conversations kept."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def dropped(self) -> Counter[str]:
        """Dropped conversations by reason."""
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(shard.dropped)
        return total


def require_own(out: Path) -> None:
    """Check that a synthesis can begin or go on at *out*.

    Raises:
        DataError: it holds other files, and no synthesis.
    """
    started = (out / STATE_NAME).exists()
    others = [] if started or not out.is_dir() else [path.name for path in out.iterdir()]
    foreign = sorted({*others} - {f"{STATE_NAME}.partial"})
    if foreign:
        raise DataError(
            f"{out}: holds other files ({foreign[0]}) and no synthesized conversations",
            hint="name a new folder with --out",
        )


def uncut(out: Path, state: Synthesis, *, num_rows: int) -> None:
    """Take what is missing to *num_rows* from what the last shard was cut from."""
    last = state.shards[-1] if state.shards else None
    whole = None if last is None else (out / last.file).with_suffix(WHOLE)
    if last is None or whole is None or not whole.is_file() or state.num_rows >= num_rows:
        return
    with whole.open(encoding="utf-8") as file:
        lines = list(file)
    kept = lines[: last.num_rows + num_rows - state.num_rows]
    dropped = {reason: n for reason, n in last.dropped.items() if reason != NOT_ASKED_FOR}
    if len(kept) < len(lines):
        dropped[NOT_ASKED_FOR] = len(lines) - len(kept)
    _write_beside(out / last.file, "".join(kept))
    state.shards[-1] = replace(last, num_rows=len(kept), dropped=dropped)
    write_state(out, state)
    if len(kept) == len(lines):
        whole.unlink()


def drawn_rows(out: Path, shards: Sequence[SynthesisShard]) -> Iterator[dict[str, Any]]:
    """Rows of every shard, with those that were not asked for."""
    names = [(Path(shard.file).with_suffix(WHOLE).name, shard.file) for shard in shards]
    return _rows(out, [whole if (out / whole).is_file() else part for whole, part in names])


def write_state(out: Path, state: Synthesis) -> None:
    _write_beside(out / STATE_NAME, json.dumps(asdict(state), indent=1))


def write_shard(path: Path, rows: Sequence[dict[str, Any]], *, num_rows: int) -> int:
    """Write a shard of the first *num_rows* of *rows*; return how many were not asked for."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    if len(lines) > num_rows:
        _write_beside(path.with_suffix(WHOLE), "".join(lines))
    _write_beside(path, "".join(lines[:num_rows]))
    return max(0, len(lines) - num_rows)


def read_state(out: Path, settings: SynthesisSettings) -> Synthesis:
    path = out / STATE_NAME
    if not path.exists():
        return Synthesis(settings)
    try:
        value = json.loads(path.read_bytes())
        stored = {**value["settings"], "stop_ids": tuple(value["settings"]["stop_ids"])}
        shards = [SynthesisShard(**shard) for shard in value["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error})", hint="remove the folder") from error
    wanted = asdict(settings)
    different = [key for key, setting in wanted.items() if stored.get(key) != setting]
    if different:
        raise DataError(
            f"{out}: holds conversations of other settings ({', '.join(different)} differ)",
            hint="use another --out, or the settings of that run",
        )
    return Synthesis(settings, shards)


def other_rows(folder: Path) -> Iterator[dict[str, Any]]:
    if not (folder / STATE_NAME).is_file():
        raise DataError(f"{folder}: holds no synthesized conversations ({STATE_NAME} is missing)")
    stored = json.loads((folder / STATE_NAME).read_bytes())
    return _rows(folder, [shard["file"] for shard in stored["shards"]])


def _rows(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        try:
            with (folder / name).open(encoding="utf-8") as file:
                yield from map(json.loads, file)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / name}: damaged ({error})") from error


def _write_beside(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
