"""The JSON of a bench: written for two readers, read back with clear errors.

Beside everything in ``dflash.measurement.Bench`` the file has what pytest-benchmark keeps of a run,
so that ``pytest-benchmark compare`` loads it too.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from dflash.errors import UsageError
from dflash.measurement import FORMAT, Bench, Comparison, Row
from dflash_bench.pytest_benchmark_layout import pytest_benchmark_parts
from dflash_bench.soundness import unsound


class BenchFile(Bench):
    """A bench, and the same steps as pytest-benchmark has them: in seconds.

    What a comparison rests on is always written, so a file that lacks it is damaged.
    """

    rows: list[Row]
    comparisons: list[Comparison]
    shapes: dict[str, dict[str, Any]] = Field(description="every shape by its name")
    options: dict[str, Any]
    machine_info: dict[str, Any] = Field(description="as pytest-benchmark has it")
    commit_info: dict[str, Any] = Field(description="as pytest-benchmark has it")
    benchmarks: list[dict[str, Any]] = Field(description="rows as pytest-benchmark has them")
    datetime: str
    version: str = Field(description="of pytest-benchmark's layout")


def bench_json(bench: Bench) -> str:
    """The text of the file."""
    facts = {name: getattr(bench, name) for name in Bench.model_fields}
    file = BenchFile(**facts, **pytest_benchmark_parts(bench))
    return file.model_dump_json(indent=2) + "\n"


def file_schema() -> dict[str, Any]:
    """The published JSON schema of the file."""
    return BenchFile.model_json_schema(mode="serialization")


def read_bench(path: Path) -> Bench:
    """Read what ``dflash bench --json`` wrote.

    Raises:
        UsageError: it cannot be read, is something else, or of another format.
    """
    content = _content(path)
    if content.get("kind") != "bench":
        raise UsageError(f"{path} is not a bench: {_guess(content)}", hint=_HINT)
    if content.get("format") != FORMAT:
        raise UsageError(
            f"{path} has format {content.get('format')}, and this dflash reads format {FORMAT}",
            hint="measure again, or read it with the dflash that wrote it",
        )
    try:
        file = BenchFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path} is not a bench: {where}: {first['msg']}", hint=_HINT) from error
    bench = Bench(**{name: getattr(file, name) for name in Bench.model_fields})
    if problem := unsound(bench):
        raise UsageError(f"{path} is not a bench: {problem}", hint=_HINT)
    return bench


_HINT = "dflash bench --json FILE writes one, dflash bench --schema says what it holds"


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except UnicodeError as error:  # also halves of letters, which JSON can hold
        raise UsageError(f"{path} is not a bench: it is no text", hint=_HINT) from error
    except json.JSONDecodeError as error:
        what = f"{path}:{error.lineno} is not JSON: {error.msg}"
        raise UsageError(what, hint=_HINT) from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not a bench: {_unreadable(error)}", hint=_HINT) from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a bench: it holds no JSON object", hint=_HINT)
    return content


def _unreadable(error: Exception) -> str:
    """What of a JSON is beyond Python, which says it in words for programmers."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"it holds a whole number of more than {sys.get_int_max_str_digits()} digits"


def _guess(content: dict[str, Any]) -> str:
    if "kind" in content:
        return f"it is of kind {content['kind']!r}"
    if "schema" in content and "case" in content:
        return "it is of a dflash before dflash bench"
    if "benchmarks" in content:
        return "it is pytest-benchmark's own"
    return "it does not say of which kind it is"
