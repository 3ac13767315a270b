"""The documentation of failure modes is made of their files and of stored verdicts."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import mkdocs_hooks
from dflash.diagnose.expected import expectation
from dflash.failures import all_modes
from mkdocs_hooks import VERDICTS, cell, index, mode_facts, on_config, page, slug_of, sources

STORED = sorted(VERDICTS.glob("*.json"))


def test_every_failure_mode_has_a_page_with_its_program() -> None:
    assert [slug_of(path) for path in sources()] == [mode.slug for mode in all_modes()]
    for path in sources():
        text = page(path)
        assert text.startswith(f"# {slug_of(path)}\n")
        assert "## Symptom" in text
        assert "def reproduce(*, faulty: bool" in text
        assert "| measures |" in text


def test_the_pages_are_in_the_navigation() -> None:
    config = on_config({"nav": [{"Home": "index.md"}, {"Failure modes": "failures/index.md"}]})
    listed = config["nav"][1]["Failure modes"]
    assert listed[0] == {"All of them": "failures/index.md"}
    assert {"future-leak": "failures/future-leak.md"} in listed


def test_the_figures_are_those_of_the_mode() -> None:
    (path,) = [path for path in sources() if slug_of(path) == "future-leak"]
    facts = mode_facts(ast.parse(path.read_text(encoding="utf-8")))
    assert facts["limit"] == "0.0"
    assert "remedy" in facts


def finding(verdict: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {
        "slug": "some", "verdict": verdict, "faulty": {"shown": 3, "launches": 5}, "part": "whole",
        "remedy_verified": "not run", **more,
    }  # fmt: skip


def test_a_cell_says_how_often_it_showed() -> None:
    def said(**facts: Any) -> str:  # noqa: ANN401 - JSON
        return cell({"findings": [finding(**facts)]}, "some")

    assert said(verdict="reproduced", remedy_verified="yes") == "yes 3/5, r"
    assert said(verdict="not reproduced", part="cpu") == "no 3/5 (part)"
    assert said(verdict="not applicable", faulty=None) == ""
    assert cell({"findings": []}, "some") == ""


def test_stored_verdicts_leave_out_what_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkdocs_hooks, "VERDICTS", tmp_path / "kept")
    facts = dict.fromkeys(mkdocs_hooks.KEPT)
    told = {
        "torch": "2.13.0+cpu",
        "level": "quick",
        "environment": {"python": "3.12.1", "gpus": [], "platform": "Secret-1.0"},
        "findings": [{**facts, "launches": [{"stacks": "/home/me/secret.py"}]}],
    }
    (tmp_path / "found.json").write_text(json.dumps(told))
    kept = mkdocs_hooks.store(tmp_path / "found.json")
    assert kept.name == "torch-2.13.0-cpu.json"
    assert "ecret" not in kept.read_text()


def test_diagnoses_of_one_kind_of_machine_are_put_together_and_of_two_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkdocs_hooks, "VERDICTS", tmp_path / "kept")

    def told(name: str, python: str, **verdicts: str) -> Path:
        facts = dict.fromkeys(mkdocs_hooks.KEPT)
        findings = [{**facts, "slug": slug, "verdict": v} for slug, v in verdicts.items()]
        where = {"python": python, "gpus": []}
        level = "standard" if name == "second.json" else "quick"
        run = {"torch": "2.13.0", "level": level, "environment": where, "findings": findings}
        (tmp_path / name).write_text(json.dumps(run))
        return tmp_path / name

    first = told("first.json", "3.12", b="inconclusive", a="reproduced")
    kept = mkdocs_hooks.store(first, told("second.json", "3.12", b="reproduced"))
    stored = json.loads(kept.read_text())
    assert stored["level"] == "quick and standard"
    found = stored["findings"]
    assert [(each["slug"], each["verdict"]) for each in found] == [
        ("a", "reproduced"),
        ("b", "reproduced"),
    ]
    with pytest.raises(SystemExit, match="not of the same kind"):
        mkdocs_hooks.store(first, told("third.json", "3.13", b="reproduced"))


def test_a_verdict_that_too_few_launches_leave_open_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkdocs_hooks, "VERDICTS", tmp_path / "kept")
    facts = dict.fromkeys(mkdocs_hooks.KEPT)
    remedies = {"a": "yes", "b": "unclear", "c": "no", "d": "not run"}
    findings = [{**facts, "slug": k, "remedy_verified": v} for k, v in remedies.items()]
    where = {"python": "3.12", "gpus": []}
    run = {"torch": "2.14.1", "level": "quick", "environment": where, "findings": findings}
    (tmp_path / "found.json").write_text(json.dumps(run))
    kept = json.loads(mkdocs_hooks.store(tmp_path / "found.json").read_text())
    assert [each["slug"] for each in kept["findings"]] == ["a", "c", "d"]


def test_a_gpu_that_was_hidden_from_a_diagnosis_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkdocs_hooks, "VERDICTS", tmp_path / "kept")
    for visible, seen in ((None, 2), ("1", 1), ("0,1", 2), ("", 0)):
        gpus = [{"name": "NVIDIA H200"}] * 2
        where = {"python": "3.12", "gpus": gpus, "cuda_visible_devices": visible}
        run = {"torch": "2.14.1", "level": "quick", "environment": where, "findings": []}
        (tmp_path / "found.json").write_text(json.dumps(run))
        kept = mkdocs_hooks.store(tmp_path / "found.json")
        assert json.loads(kept.read_text())["gpus"] == ["NVIDIA H200"] * seen, visible


def test_the_table_has_a_column_for_every_stored_diagnosis() -> None:
    heads = next(line for line in index().splitlines() if line.startswith("| failure mode"))
    assert heads.count("|") == 2 + len(STORED)
    assert STORED


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_verdicts_are_what_the_pages_say_about_versions(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    modes = {mode.slug: mode for mode in all_modes()}
    num_gpus = len(stored["gpus"])
    for found in stored["findings"]:
        mode = modes[found["slug"]]
        expected = expectation(mode, stored["torch"], num_gpus=num_gpus).expected
        if mode.affected and expected != "not known" and found["faulty"] is not None:
            assert found["verdict"] == expected, found["slug"]
            assert found["remedy_verified"] in ("yes", "not run")
