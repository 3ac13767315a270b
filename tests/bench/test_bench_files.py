"""The JSON of a bench: what is written is read back, here and by pytest-benchmark."""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_samples import sample

from dflash.errors import UsageError
from dflash_bench.files import bench_json, file_schema, read_bench


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    path.write_text(bench_json(sample()), encoding="utf-8")
    return path


def change(path: Path, **changes: Any) -> Path:  # noqa: ANN401
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_what_is_written_is_read_back(file: Path) -> None:
    assert read_bench(file) == sample()


def test_every_key_that_is_written_is_in_the_published_schema(file: Path) -> None:
    schema = file_schema()
    written = json.loads(file.read_text())
    assert written.keys() == schema["properties"].keys()
    row = schema["$defs"]["Row"]
    assert written["rows"][0].keys() == row["properties"].keys()
    assert "per second" in row["properties"]["per_s"]["description"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{}", "it does not say of which kind it is"),
        ('{"kind": "bench changes"}', "it is of kind 'bench changes'"),
        ('{"schema": 1, "case": "drafter_step"}', "it is of a dflash before dflash bench"),
        ('{"benchmarks": [], "machine_info": {}}', "it is pytest-benchmark's own"),
        ("[]", "it holds no JSON object"),
    ],
)
def test_another_json_is_refused_by_what_it_is(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_bench(path)
    assert caught.value.what == f"{path} is not a bench: {why}"
    assert "dflash bench --json" in caught.value.hint


def test_another_format_is_refused_by_its_number(file: Path) -> None:
    with pytest.raises(UsageError, match="has format 2, and this dflash reads format 1"):
        read_bench(change(file, format=2))


def test_a_wrong_value_is_named_by_its_place(file: Path) -> None:
    rows = json.loads(file.read_text())["rows"]
    rows[1]["state"] = "lost"
    with pytest.raises(UsageError, match=r"rows\.1\.state: Input should be 'measured'"):
        read_bench(change(file, rows=rows))


@pytest.mark.parametrize("missing", ["rows", "comparisons", "shapes", "options"])
def test_a_file_that_lacks_what_is_always_written_is_no_empty_bench(
    file: Path, missing: str
) -> None:
    content = json.loads(file.read_text())
    del content[missing]
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=f"is not a bench: {missing}: Field required"):
        read_bench(file)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("rows.0.per_s.low", 0.0, "is 0.0, and must be above 0"),
        ("rows.0.per_s.high", 1.0, "rows.0.per_s is .* outside of its interval"),
        ("rows.0.step_ms.median", math.nan, "is nan, and must be a finite number"),
        ("rows.0.step_ms.p90", math.inf, "is inf, and must be a finite number"),
        ("rows.0.turns_ms.0.1", -1.0, "is -1.0, and must be above 0"),
        ("rows.0.turns_ms.0", [], "is a turn without a step"),
        ("rows.0.memory.device_allocs", 10**400, r"is above 1e\+18"),
        ("rows.0.memory.peak_reserved_gib", math.nan, "is nan, and must be a finite number"),
        ("comparisons.0.ratio.low", 0.0, "is 0.0, and must be above 0"),
        ("options.devices", 5, "is no list"),
        ("rows.0.step_ms", None, "was measured, and has no step_ms"),
        ("rows.0.turns_ms", [], "was measured, and has no turns_ms"),
        ("rows.0.step_ms.p10", 1e6, "is out of order"),
        ("rows.0.graphs.cached", 10, r"rows.0.graphs.cached is 10, and compiled 0"),
        ("rows.0.memory.rss_gib", -3.0, "no bench counts or measures less than 0"),
        ("comparisons.0.pairs", -3, "no bench counts or measures less than 0"),
        ("comparisons.0.row", "nobody", "is about nobody, which is no row"),
        ("rows.1.mode", "eager", "is the second one of"),
        ("shapes", {}, "has no made-up-3072, at which rows.0 was measured"),
        ("device", "a GPU\nof two lines", r"is 'a GPU\\nof two lines', and must be one line"),
        ("rows.0.mode", "ea\nger", r"is 'ea\\nger', and must be one line"),
        ("environment.packages.torch", "2\n", "must be one line"),
    ],
)
def test_a_number_that_no_bench_has_is_named_by_its_place(
    file: Path, *, place: str, value: object, why: str
) -> None:
    content = json.loads(file.read_text())
    inner = content
    *path, last = [int(word) if word.isdecimal() else word for word in place.split(".")]
    for word in path:
        inner = inner[word]
    inner[last] = value
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=f"a.json is not a bench: .*{why}") as caught:
        read_bench(file)
    told = place.removesuffix(".high").removesuffix(".p10").removesuffix(".mode")
    what = caught.value.what
    assert told in what or set(told.rsplit(".", 1)) <= set(what.split())
    assert "\n" not in caught.value.what
    assert caught.value.hint


def test_a_loss_that_is_nan_is_what_a_mode_computed(tmp_path: Path) -> None:
    rows = [row.model_copy(update={"loss": math.nan}) for row in sample().rows]
    path = tmp_path / "a.json"
    path.write_text(bench_json(sample().model_copy(update={"rows": rows})))
    assert all(row.loss is not None and math.isnan(row.loss) for row in read_bench(path).rows)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 200_000, "it is nested too deeply"),
        ('{"kind": ' + "9" * 5000 + "}", "it holds a whole number of more than 4300 digits"),
        ('{"kind": "bench", "date": "\\ud800"}', "it is no text"),
    ],
)
def test_what_is_beyond_a_reader_is_refused_in_its_words(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_bench(path)
    assert caught.value.what == f"{path} is not a bench: {why}"
    assert caught.value.hint


def test_what_is_no_json_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{\n"kind": "bench",\n')
    with pytest.raises(UsageError, match=r"x\.json:3 is not JSON"):
        read_bench(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is no text"):
        read_bench(path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_bench(tmp_path / "missing.json")


def test_pytest_benchmark_compares_the_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    other.write_text(file.read_text())
    words = [sys.executable, "-m", "pytest_benchmark", "compare", str(file), str(other)]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("drafter-step[made-up-3072-fixed-graphed]") == 2
    assert "Failed to load" not in ran.stdout + ran.stderr
    grouped = subprocess.run(
        [*words, "--csv", "out.csv", "--group-by", "param"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert grouped.returncode == 0, grouped.stderr
    assert "made-up-3072" in (tmp_path / "out.csv").read_text()


def test_its_stats_are_of_the_timed_steps_in_seconds(file: Path) -> None:
    written = json.loads(file.read_text())
    row = sample().rows[0]
    times_s = [time_ms / 1000 for turn in row.turns_ms for time_ms in turn]
    stats = written["benchmarks"][0]["stats"]
    assert stats["median"] == pytest.approx(statistics.median(times_s))
    assert stats["ops"] == pytest.approx(len(times_s) / sum(times_s))
    assert stats["rounds"] == len(times_s)
    assert stats["min"] <= stats["ld15iqr"] <= stats["q1"] <= stats["median"]
    assert stats["median"] <= stats["q3"] <= stats["hd15iqr"] <= stats["max"]
    assert stats["outliers"].split(";")[1] == str(stats["iqr_outliers"])
    assert written["benchmarks"][0]["extra_info"]["memory"]["peak_reserved_gib"] == 25.1


def test_rows_without_a_timed_step_are_no_benchmarks(file: Path) -> None:
    written = json.loads(file.read_text())
    assert len(written["benchmarks"]) == sum(bool(row.turns_ms) for row in sample().rows)
