"""What cannot be written is refused before any work, by every command that writes something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli.__main__ import main
from dflash.cli.output import check_folder
from dflash.errors import UsageError

ROOT = Path(__file__).parents[2]
BLOCKED = (
    "import sys; sys.modules.update(torch=None, transformers=None)\n"
    "from dflash.cli.__main__ import main\n"
    "sys.exit(main(sys.argv[1:]))"
)
COMMANDS = {
    "eval": "eval RUN --json FILE",
    "export": "export RUN FILE",
    "export speculators": "export RUN FILE --to speculators",
    "data prepare": "data prepare rows.jsonl --tokenizer stdlib-lm --out FILE",
    "data synthesize": "data synthesize --target stdlib-lm --num 1 --out FILE",
    "bench": "bench --json FILE",
    "bench markdown": "bench --markdown FILE",
    "bench html": "bench --html FILE",
    "bench scaling": "bench scaling --values 1,2 --html FILE",
    "diagnose": "diagnose label-shift --json FILE",
    "diagnose junit": "diagnose label-shift --junit FILE",
    "diagnose run": "diagnose run RUN --json FILE",
    "diagnose watch": "diagnose watch --json FILE -- true",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("mine")
    words = COMMANDS[name].replace("FILE", str(tmp_path / "file" / "out")).split()
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert "cannot be written: " in ran.stderr
    assert "Not a directory" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LATE = {
    "eval": ("eval RUN --device cpu --num-prompts 1 --max-new-tokens 4 --json OUT", "tau"),
    "diagnose": ("diagnose label-shift --level quick --json OUT", "label-shift"),
    "diagnose run": ("diagnose run EMPTY --json OUT", "no failure mode found"),
    "diagnose watch": ("diagnose watch --json OUT -- true", "ok"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_cannot_be_written_at_the_end_is_still_shown(
    tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], *, name: str
) -> None:
    (tmp_path / "records.jsonl").touch()
    command, shown = LATE[name]
    for word, path in {"RUN": run_dir, "EMPTY": tmp_path, "OUT": "/dev/full"}.items():
        command = command.replace(word, str(path))
    assert main(command.split()) == 2
    said = capfd.readouterr()
    assert "error: the report /dev/full cannot be written: No space left" in said.err
    assert shown in said.out + said.err.partition("error:")[0]


@pytest.mark.parametrize("name", LATE)
def test_json_for_a_stdout_that_is_closed_is_refused_before_any_work(
    tmp_path: Path, name: str
) -> None:
    words = LATE[name][0].replace("OUT", "-")
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {words} >&-', sys.executable, BLOCKED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    assert "error: stdout is closed, so no JSON can be printed" in ran.stderr


def test_a_folder_may_be_new_with_new_parents_or_there(tmp_path: Path) -> None:
    for replaced in (True, False):
        check_folder(tmp_path / "new" / "folder", replaced=replaced)
        check_folder(tmp_path, replaced=replaced)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_the_current_one_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "..", "../../" + tmp_path.name, ""):
        with pytest.raises(UsageError, match="holds the current one"):
            check_folder(Path(place), replaced=True)
    check_folder(Path(), replaced=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    (locked / "empty").mkdir(parents=True)
    locked.chmod(0o555)
    with pytest.raises(UsageError, match="locked: Permission denied"):
        check_folder(locked / "new", replaced=False)
    with pytest.raises(UsageError, match="locked: Permission denied"):
        check_folder(locked / "empty", replaced=True)
    check_folder(locked / "empty", replaced=False)


def test_what_synthesize_would_begin_among_other_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **_more: object) -> None:
        raise AssertionError("the target is loaded only after that")

    monkeypatch.setattr("dflash.target.model.Target.load", load)
    (tmp_path / "notes.txt").write_text("mine")
    words = ["data", "synthesize", "--target", "stdlib-lm", "--num", "1", "--out", str(tmp_path)]
    assert main(words) == 12
    assert "holds other files (notes.txt)" in capsys.readouterr().err
