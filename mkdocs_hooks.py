"""Pages of the documentation that are written nowhere else: one a failure mode, and their table.

A failure mode's page is its file's docstring; the table is made of verdicts stored under
``docs/measurements/data/verdicts``. To store those of
``dflash diagnose all --json F``, without its machine's paths: ``python mkdocs_hooks.py F``; of
several files of one kind of machine the modes are put together.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PAGES = ROOT / "dflash" / "failures"
VERDICTS = ROOT / "docs" / "measurements" / "data" / "verdicts"
KEPT = ("slug", "verdict", "why", "expected", "part", "remedy_verified", "remedy_why", "worst",
        "best", "limit", "unit", "faulty", "sound")  # fmt: skip
SHORT = {"not reproduced": "no", "reproduced": "yes", "not applicable": "", "inconclusive": "?"}
INTRODUCTION = (
    "`dflash diagnose SLUG` reproduces one in processes of its own and verifies the remedy;",
    "`dflash diagnose all` says which execution modes are safe on a machine; `dflash explain",
    "SLUG` prints a page. Below: whether the failure showed, in how many launches, by torch;",
    "`r` where the remedy was verified in the same run, `part` where only what a CPU can show of",
    "it was run.",
)


def on_config(config: Any) -> Any:  # noqa: ANN401 - mkdocs' own, which has no types
    """Put the pages into the navigation."""
    pages = [{title_of(path): f"failures/{slug_of(path)}.md"} for path in sources()]
    for entry in config["nav"]:
        if "Failure modes" in entry:
            entry["Failure modes"] = [{"All of them": "failures/index.md"}, *pages]
    return config


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401
    """Write the pages."""
    from mkdocs.structure.files import File

    texts = {f"failures/{slug_of(path)}.md": page(path) for path in sources()}
    texts["failures/index.md"] = index()
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    return files


def sources() -> list[Path]:
    return sorted(path for path in PAGES.glob("*.py") if not path.name.startswith("_"))


def slug_of(path: Path) -> str:
    return path.stem.replace("_", "-")


def title_of(path: Path) -> str:
    return slug_of(path)


def page(path: Path) -> str:
    """One failure mode as Markdown: sections, then the figures of its MODE and its program."""
    sys.path.insert(0, str(ROOT))
    from dflash.failures._page import read_page

    tree = ast.parse(path.read_text(encoding="utf-8"))
    read = read_page(ast.get_docstring(tree) or "")
    lines = [f"# {slug_of(path)}", "", read.title, ""]
    for heading, text in read.sections.items():
        body = f"```\n{text}\n```" if heading == "Sources" else text.replace("``", "`")
        lines += [f"## {heading}", "", body, ""]
    facts = mode_facts(tree)
    lines += ["## In figures", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "## Program", "", "```python", program(path), "```", ""]
    return "\n".join(lines)


def mode_facts(tree: ast.Module) -> dict[str, str]:
    """What MODE says in so many words: constants and short expressions."""
    calls = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    mode = next(
        c for c in calls if isinstance(c, ast.Call) and "FailureMode" in ast.unparse(c.func)
    )
    names = ("measures", "unit", "limit", "device", "deaths", "remedy", "affected")
    found = {word.arg: _plain(word.value) for word in mode.keywords if word.arg in names}
    return {name: found[name] for name in names if name in found}


def _plain(value: ast.expr) -> str:
    """A constant as text, anything else as code."""
    return str(value.value) if isinstance(value, ast.Constant) else f"`{ast.unparse(value)}`"


def program(path: Path) -> str:
    """The file below its docstring."""
    text = path.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[first.end_lineno or 0 :]).strip()


def index() -> str:
    """All modes, what they are, and what the stored diagnoses say about each torch."""
    stored = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(VERDICTS.glob("*"))]
    stored.sort(key=lambda run: (run["gpus"] != [], [int(n) for n in run["torch"].split(".")[:2]]))
    heads = [f"{run['torch']}<br>{run['machine']}" for run in stored]
    lines = [
        "# Failure modes", "",
        *INTRODUCTION, "",
        " | ".join(["| failure mode", *heads]) + " |",
        "|" + "---|" * (1 + len(heads)),
    ]  # fmt: skip
    for path in sources():
        slug = slug_of(path)
        cells = [cell(run, slug) for run in stored]
        lines.append(" | ".join([f"| [{slug}]({slug}.md)", *cells]) + " |")
    return "\n".join([*lines, ""])


def cell(run: dict[str, Any], slug: str) -> str:
    found = next((each for each in run["findings"] if each["slug"] == slug), None)
    if found is None:
        return ""
    rate, part = found["faulty"], " (part)" if found["part"] == "cpu" else ""
    times = f" {rate['shown']}/{rate['launches']}" if rate else ""
    remedy = ", r" if found["remedy_verified"] == "yes" else ""
    return f"{SHORT[found['verdict']]}{times}{remedy}{part}"


def store(*files: Path) -> Path:
    """Keep the verdicts of diagnoses of one kind of machine, without paths, stacks and output.

    Of a mode that several have, the last one's counts; one whose remedy too few launches leave
    open is left out.
    """
    read, *others = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if len({_where(run) for run in (read, *others)}) > 1:
        raise SystemExit(f"{', '.join(map(str, files))} are not of the same kind of machine")
    by_slug = {each["slug"]: each for run in (read, *others) for each in run["findings"]}
    decided = [slug for slug in sorted(by_slug) if by_slug[slug]["remedy_verified"] != "unclear"]
    gpus = _gpus(read)
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    kept = {
        "torch": read["torch"],
        "python": read["environment"]["python"],
        "machine": machine,
        "gpus": gpus,
        "level": " and ".join(sorted({run["level"] for run in (read, *others)})),
        "findings": [{name: by_slug[slug][name] for name in KEPT} for slug in decided],
    }
    version = read["torch"].partition("+")[0]
    out = VERDICTS / f"torch-{version}-{f'{len(gpus)}gpu' if gpus else 'cpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return out


def _where(run: dict[str, Any]) -> tuple[str, ...]:
    return (run["torch"], run["environment"]["python"], *_gpus(run))


def _gpus(run: dict[str, Any]) -> list[str]:
    """Names of the GPUs that the run could use, of all that the driver lists."""
    names = [gpu["name"] for gpu in run["environment"]["gpus"]]
    visible = run["environment"].get("cuda_visible_devices")
    return names if visible is None else names[: len([one for one in visible.split(",") if one])]


if __name__ == "__main__":
    store(*map(Path, sys.argv[1:]))
