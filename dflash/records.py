"""What a run writes: one JSON object a line, with a ``kind``; units are in the names.

A line is written whole and flushed, so a killed process leaves at most one torn last line; readers
leave that out, writers and resumed runs cut it off.
"""

import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dflash.errors import DataError
from dflash.readable import readable_facts


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    _readable = model_validator(mode="before")(readable_facts)

    step: int = Field(ge=0, description="optimizer steps done when it was written")


class StepRecord(_Line):
    """One logged step; averages and rates cover the steps since the record before.

    Evaluations and checkpoints between them are in no figure of time.
    """

    kind: Literal["step"] = "step"
    epoch: float = Field(default=0.0, description="passes over the data so far")
    loss: float = Field(description="weighted cross-entropy per unit of weight, nat")
    accepted_tokens_per_block: float | None = Field(
        default=None,
        description="true prefix and bonus token, averaged over blocks of metric batches",
    )
    token_accuracy: float | None = Field(
        default=None, description="share of supervised slots predicted, over metric batches"
    )
    lr: float = Field(description="learning rate of the last step")
    grad_norm: float = Field(description="global norm before clipping, averaged over steps")
    tokens: int = Field(default=0, description="real (not padding) tokens since the run began")
    tokens_per_s: float = Field(default=0.0, description="real tokens per second of steps")
    padding_share: float = Field(default=0.0, description="padding positions of all positions")
    step_s: float = Field(default=0.0, description="seconds a step")
    wait_target_s: float = Field(
        default=0.0, description="seconds a step the target had no free slot"
    )
    wait_drafter_s: float = Field(
        default=0.0, description="seconds a step the drafter had no features"
    )
    wait_data_s: float = Field(default=0.0, description="seconds a step the target had no batch")
    allocated_gib: dict[str, float] = Field(default={}, description="peak allocated by device")
    reserved_gib: dict[str, float] = Field(default={}, description="peak reserved by device")
    device_allocs: dict[str, int] = Field(default={}, description="allocations so far by device")
    rss_gib: float = Field(default=0.0, description="resident memory of the process")
    recompiles: int = Field(
        default=0, description="graphs compiled since the record before, by any thread"
    )
    captures: int = Field(
        default=0, description="CUDA graphs captured since the record before, by any thread"
    )


class EvalRecord(_Line):
    """Accepted length and speed measured by real decoding."""

    kind: Literal["eval"] = "eval"
    tau: float = Field(description="tokens per verify step, bonus included; mean over prompts")
    tau_per_prompt: list[float | None] = Field(
        description="mean over the verify steps of each prompt; null where there was none"
    )
    accepted_per_position: list[float] = Field(
        description="share of verify steps that accepted draft 1, 2, .. B-1"
    )
    steps_by_accepted_tokens: list[int] = Field(
        default=[], description="verify steps that committed 1, 2, .. B tokens"
    )
    tokens_per_s_drafter: float = Field(description="decoded with the drafter")
    tokens_per_s_plain: float | None = Field(
        default=None, description="decoded by the target alone, if it was"
    )
    speedup: float | None = Field(
        default=None, description="ratio of the two on the prompts decoded both ways"
    )
    num_prompts: int
    max_new_tokens: int
    temperature: float = Field(default=0.0, description="of the target's choice; 0 is greedy")
    decode_loop: Literal["captured", "eager"] = Field(
        default="eager", description="replays of CUDA graphs, or Python calls"
    )
    eager_because: str | None = Field(default=None, description="why it was eager")


class EventRecord(_Line):
    """Something that happened once: a start, a checkpoint, a fallback, a finding."""

    kind: Literal["event"] = "event"
    name: str
    detail: dict[str, Any] = {}


Record = Annotated[StepRecord | EvalRecord | EventRecord, Field(discriminator="kind")]


@cache
def _adapter() -> TypeAdapter[StepRecord | EvalRecord | EventRecord]:
    return TypeAdapter(Record)


class RecordWriter:
    """Appends records to a file, a whole line at a time, from any thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, _whole_bytes(path.read_bytes()))
        self._file = path.open("ab")
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        line = record.model_dump_json().encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_records(path: Path) -> Iterator[StepRecord | EvalRecord | EventRecord]:
    """Every record of the file, in order; a torn last line is left out.

    Raises:
        DataError: the file cannot be read, or a whole line is no record; names file and line.
    """
    for number, line in _whole_lines(path):
        try:
            yield _adapter().validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            text = f"{path}:{number} is not a record of a run: {where or 'line'}: {first['msg']}"
            raise DataError(text) from error


def truncate_after(path: Path, step: int) -> int:
    """Drop records of steps after *step* and a torn last line; a missing file has none.

    Returns:
        how many whole records were dropped.

    Raises:
        DataError: a line is no JSON object with a ``step``.
    """
    if not path.exists():
        return 0
    lines = [(_step_of(line, f"{path}:{number}"), line) for number, line in _whole_lines(path)]
    kept = [line for line_step, line in lines if line_step <= step]
    beside = path.with_name(f"{path.name}.partial")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    beside.replace(path)
    return len(lines) - len(kept)


def _step_of(line: bytes, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is not a record of a run") from error


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    lines = content[: _whole_bytes(content)].splitlines()
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _whole_bytes(content: bytes) -> int:
    """How many bytes belong to lines that end."""
    return content.rfind(b"\n") + 1
