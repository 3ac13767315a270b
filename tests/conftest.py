"""What several parts' tests share."""

from pathlib import Path

import pytest
from tiny_runs import write_target, write_texts


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random ``target`` and some ``texts``; nobody writes into it."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_texts(folder / "texts")
    return folder
