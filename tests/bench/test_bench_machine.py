"""The commit that a bench claims is that of its own working tree, or none."""

import subprocess
from pathlib import Path

import pytest

from dflash_bench import machine

ME = ("-c", "user.name=A", "-c", "user.email=a@example.com")


def git(folder: Path, *words: str) -> str:
    asked = ["git", *ME, *words]
    return subprocess.run(
        asked, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("dflash_bench", "venv/site-packages/dflash_bench"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "machine.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "dflash_bench")
    git(tmp_path, "commit", "-qm", "Begin")
    return tmp_path


def commit_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(machine, "__file__", str(file))
    return machine.commit()


def test_a_changed_working_tree_is_marked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "dflash_bench" / "machine.py"
    head = git(project, "rev-parse", "--short", "HEAD")
    assert commit_of(file, monkeypatch) == head
    file.write_text("changed")
    assert commit_of(file, monkeypatch) == f"{head}+"


def test_an_installed_copy_does_not_claim_the_commit_of_the_project_around_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project / "venv" / "site-packages" / "dflash_bench" / "machine.py"
    assert commit_of(file, monkeypatch) is None
