"""Which files a source means."""

from pathlib import Path

import pytest

from dflash.data.shards import file_sha256
from dflash.data.sources import find_sources
from dflash.data.stdlib import stdlib_files
from dflash.errors import DataError


def test_a_folder_means_its_readable_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name in ("b/two.md", "a.py", "c.jsonl", "ignored.bin", ".hidden.txt", "__pycache__/x.py"):
        (tmp_path / name).write_text("text")
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2")
    (tmp_path / "empty.py").write_text("")
    found = find_sources([tmp_path])
    names = [(file.path.relative_to(tmp_path).as_posix(), file.kind) for file in found]
    assert names == [("a.py", "text"), ("c.jsonl", "jsonl"), ("b/two.md", "text")]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("text")
    (tmp_path / "deep" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dead.txt").symlink_to(tmp_path / "nothing.txt")
    assert [file.path.name for file in find_sources([tmp_path])] == ["a.txt"]


def test_the_splits_of_the_standard_library_share_no_file() -> None:
    train = {file.path for file in find_sources(["stdlib:train"])}
    heldout = {file.path for file in find_sources(["stdlib:heldout"])}
    assert not train & heldout
    assert train | heldout == {path for path in stdlib_files("all") if path.stat().st_size}
    assert find_sources(["stdlib:heldout"])[0].name.startswith("stdlib/")


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing.jsonl", "no such file or folder"), ("empty", "no file with a known ending")],
)
def test_a_source_that_is_not_there_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_sources([tmp_path / name])


def test_a_binary_file_and_a_json_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\0\1\2")
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(DataError, match="a binary file"):
        find_sources([tmp_path / "model.bin"])
    with pytest.raises(DataError, match="one JSON object a line"):
        find_sources([tmp_path / "rows.json"])


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="no data source was given"):
        find_sources([])


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        file_sha256(tmp_path)  # a folder in the place of a file: even root cannot read it
    assert caught.value.exit_code == 12
