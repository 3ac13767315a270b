"""The shape of the house: floors, sizes, names, and what may be imported where."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "errors": 0, "config": 0, "records": 0, "environment": 0, "nvml": 0, "measurement": 0,
    "readable": 0,
    "drafter": 1,
    "data": 2, "target": 2, "decode": 2, "execution": 2,
    "pipeline": 3,
    "train": 4,
    "failures": 5, "diagnose": 5,
    "report": 6, "cli": 6,
}  # fmt: skip
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
MAX_PARAMETERS, MAX_POSITIONAL = 8, 3
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
WITHOUT_TORCH = [
    "dflash", "dflash.errors", "dflash.config", "dflash.records", "dflash.environment",
    "dflash.nvml", "dflash.cli.__main__", "dflash.cli.commands", "dflash.cli.config",
    "dflash.cli.env", "dflash.cli.diagnose", "dflash.cli.diagnose_watch",
    "dflash.report", "dflash.report.curve", "dflash.report.progress", "dflash.report.screen",
    "dflash.report.tensorboard", "dflash.report.bench",
    "dflash.report.bench_changes", "dflash.report.bench_html", "dflash.report.bench_markdown",
    "dflash.diagnose.select", "dflash_bench.selection", "dflash_bench.shape_files",
]  # fmt: skip


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


OURS = [*sources("dflash"), *sources("dflash_bench")]
every_file = pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))


def imports(path: Path) -> Iterator[tuple[int, int, str]]:
    """Line, number of leading dots, and dotted name of everything that *path* imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from ((node.lineno, node.level, f"{base}.{a.name}") for a in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def floor_of(unit: str) -> int:
    return FLOORS[unit]


@every_file
def test_imports_never_point_up(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "dflash" or parts[1] == "__init__":
        return
    for line, _, name in imports(path):
        words = name.split(".")
        if words[0] == "dflash" and len(words) > 1 and words[1] != "__version__":
            above = f"{path.relative_to(ROOT)}:{line} imports {name}, a higher floor"
            assert floor_of(words[1]) <= floor_of(parts[1]), above


@every_file
def test_imports_are_absolute(path: Path) -> None:
    relative = [f"{path.name}:{line}" for line, dots, _ in imports(path) if dots]
    assert relative == []


@every_file
def test_the_benches_are_imported_by_the_command_line_only(path: Path) -> None:
    if path.is_relative_to(ROOT / "dflash" / "cli") or path.is_relative_to(ROOT / "dflash_bench"):
        return
    assert [name for _, _, name in imports(path) if name.split(".")[0] == "dflash_bench"] == []


@every_file
def test_a_file_fits_three_hundred_lines(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= MAX_FILE_LINES


@every_file
def test_a_function_fits_one_screen(path: Path) -> None:
    long = {
        node.name: length
        for node in functions(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


@every_file
def test_a_function_takes_few_arguments(path: Path) -> None:
    crowded, lines = {}, path.read_text(encoding="utf-8").splitlines()
    for node in functions(path):
        positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        positional = [name for name in positional if name not in ("self", "cls")]
        positional = [name for name in positional if not name.startswith("_")]  # unused: a callback
        total = len(positional) + len(node.args.kwonlyargs)
        if re.search(r"noqa: PLR091[37]\W.*\w{3}", lines[node.lineno - 1]):
            continue  # a library's callback or a command's options, with its reason on the line
        if len(positional) > MAX_POSITIONAL or total > MAX_PARAMETERS:
            crowded[node.name] = (len(positional), total)
    assert crowded == {}


@every_file
def test_a_module_is_named_after_what_it_holds(path: Path) -> None:
    names = set(path.relative_to(ROOT).with_suffix("").parts)
    words = {word for name in names for word in name.strip("_").split("_")}
    assert words & BANNED_NAMES == set()


def test_every_part_has_a_floor() -> None:
    parts = {
        path.stem
        for path in (ROOT / "dflash").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or any(path.glob("*.py"))
    }
    assert parts <= FLOORS.keys()


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
