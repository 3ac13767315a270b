"""A run folder is read as far as it goes, and what cannot be read is said in one sentence."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash.cli.__main__ import main
from dflash.diagnose.aftermath import diagnose_run
from dflash.diagnose.run_folder import read_run
from dflash.errors import UsageError

Capture = pytest.CaptureFixture[str]
STEP = '{"kind":"step","step":7,"loss":1.0,"lr":0.001,"grad_norm":1.0}\n'
DIED = '{"kind":"event","step":7,"name":"died","detail":{"error":"OSError: gone"}}\n'
DIED_NOTE = "it ended after step 7 with OSError: gone"
FILES = ("records.jsonl", "stacks.txt", "environment.json", "dflash-crash-20260102-030405-6.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "records.jsonl").write_text(STEP + DIED)
    (tmp_path / "environment.json").write_text("{}")
    return tmp_path


def refused(folder: Path, capsys: Capture) -> tuple[str, str]:
    """The sentence and the hint with which the command refuses the folder."""
    assert main(["diagnose", "run", str(folder)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    what, hint = output.err.splitlines()
    return what.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, capsys: Capture) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    what, hint = refused(folder, capsys)
    assert what == f"{folder / name} cannot be read: {os.strerror(errno.EISDIR)}"
    assert hint == "move away what is in its place"


@pytest.mark.parametrize("name", ["", *FILES])
def test_what_one_may_not_read_is_named(
    folder: Path, *, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    place = folder / name
    if name:
        place.touch()
    how = "read_text" if name else "iterdir"
    original = getattr(Path, how)

    def locked(path: Path, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if path == place:  # root may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, how, locked)
    what, hint = refused(folder, capsys)
    assert what == f"{place} cannot be read: {os.strerror(errno.EACCES)}"
    assert hint == "get the right to read it"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"garbage\n", "records.jsonl:1 is not a record"),
        (b"{}\n", "records.jsonl:1 is not a record"),
        (b'["step"]\n' + STEP.encode(), "records.jsonl:1 is not a record"),
        (b"\x80\x81\xff\n", "records.jsonl:1 is not a record"),
        (b"\x80garbage without a line", "records.jsonl holds no records of a run"),
    ],
)
def test_records_that_are_none_are_said_so(
    content: bytes, where: str, *, folder: Path, capsys: Capture
) -> None:
    (folder / "records.jsonl").write_bytes(content)
    what, hint = refused(folder, capsys)
    assert where in what
    assert "move records.jsonl away" in hint
    (folder / "records.jsonl").unlink()  # the hint, followed
    assert diagnose_run(folder).notes == ["it has no records: it ended before its first"]


def test_a_first_record_that_was_torn_is_a_crash(folder: Path) -> None:
    (folder / "records.jsonl").write_text(STEP[:20])
    assert diagnose_run(folder).notes == ["it has no records: it ended before its first"]


def test_records_are_read_up_to_a_damaged_line(folder: Path, capsys: Capture) -> None:
    (folder / "records.jsonl").write_text(STEP + DIED + "\0\0\0\n" + STEP)
    assert [record.step for record in read_run(folder).records] == [7, 7]
    died, damaged = diagnose_run(folder).notes
    assert died == DIED_NOTE
    assert damaged.startswith(f"{folder}/records.jsonl:3 is not a record of a run: ")
    assert damaged.endswith("that line and those behind it were not read")
    assert main(["diagnose", "run", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("?? ")


def test_a_run_whose_last_records_are_damaged_may_have_ended_well(folder: Path) -> None:
    (folder / "records.jsonl").write_text(STEP + "garbage\n")
    assert ["without a word" in note for note in diagnose_run(folder).notes] == [False]


@pytest.mark.parametrize("content", [b"[1", b"", b"[1]", b'{"packages": {"tor', b"\xff\xfe"])
def test_a_half_written_environment_is_read_around(
    content: bytes, folder: Path, capsys: Capture
) -> None:
    (folder / "environment.json").write_bytes(content)
    died, damaged = diagnose_run(folder).notes
    assert died == DIED_NOTE
    assert damaged.startswith("environment.json is damaged, so the rest was read without it: no JS")
    assert main(["diagnose", "run", str(folder), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [died, damaged]


def test_a_run_without_an_environment_is_diagnosed(folder: Path) -> None:
    (folder / "environment.json").unlink()
    assert diagnose_run(folder).notes == [DIED_NOTE]


def test_a_file_in_the_place_of_a_folder_is_no_run(folder: Path) -> None:
    with pytest.raises(UsageError, match="is no run folder"):
        read_run(folder / "records.jsonl")
