"""The code on our own pages, run as a reader would."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def run_examples(page: str) -> None:
    """Run every Python block of a page of ``docs``, each in a namespace of its own."""
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks, f"{page} has no Python"
    for code in blocks:
        exec(compile(code, page, "exec"), {})  # noqa: S102 - our own page
