"""What several parts' tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import write_target, write_texts

from dflash.execution import process_seal


@pytest.fixture(autouse=True)
def unsealed_again() -> Iterator[None]:
    """Fail the test that leaves the process sealed, and not all that come after it."""
    yield
    was_sealed = process_seal().closed
    process_seal().open()
    assert not was_sealed, "the process was left sealed"


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random ``target`` and some ``texts``; nobody writes into it."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_texts(folder / "texts")
    return folder
