"""What several parts' tests share."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import write_target, write_texts

from dflash.execution import process_seal

WORKERS = re.compile(r"loader|pipeline|(target|drafter)-\d+")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves the process sealed or a worker alive, not those after it."""
    before = set(threading.enumerate())
    yield
    was_sealed = process_seal().closed
    process_seal().open()
    assert not was_sealed, "the process was left sealed"
    deadline = time.monotonic() + 5.0
    while left := [
        thread.name
        for thread in set(threading.enumerate()) - before
        if WORKERS.fullmatch(thread.name)
    ]:
        assert time.monotonic() < deadline, f"threads were left running: {left}"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random ``target`` and some ``texts``; nobody writes into it."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    write_texts(folder / "texts")
    return folder
