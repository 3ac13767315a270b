"""``dflash bench compare`` as a user meets it: what it judges, refuses and leaves with."""

import json
from pathlib import Path

import pytest
from bench_samples import GOOD, error, good, write

from dflash.cli.__main__ import main
from dflash.measurement import Bench
from dflash_bench.files import bench_json

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def slower(bench: Bench, factor: float) -> Bench:
    rows = []
    for row in bench.rows:
        assert row.step_ms is not None
        turns = [[time_ms * factor for time_ms in turn] for turn in row.turns_ms]
        names = ("median", "p10", "p90", "max")
        update = {name: getattr(row.step_ms, name) * factor for name in names}
        spread = row.step_ms.model_copy(update=update)
        rows.append(row.model_copy(update={"turns_ms": turns, "step_ms": spread}))
    return bench.model_copy(update={"rows": rows})


def test_a_regression_is_exit_one(tmp_path: Path, capsys: Capture) -> None:
    one = write(tmp_path / "a.json", good())
    other = write(tmp_path / "b.json", slower(good(), 1.1))
    assert main(["bench", "compare", one, other, "--fail-if", "step_ms > +3%"]) == 1
    said = capsys.readouterr().out
    assert "regression" in said
    assert max(map(len, said.splitlines())) <= 78
    assert main(["bench", "compare", one, other, "--fail-if", "step_ms > +20%"]) == 0
    assert main(["bench", "compare", one, other]) == 0


def test_a_comparison_never_replaces_what_it_compares(tmp_path: Path, capsys: Capture) -> None:
    one, other = (write(tmp_path / f"{name}.json", good()) for name in "ab")
    before = Path(one).read_text()
    for option in ("--json", "--markdown"):
        for file in (one, other):
            assert main(["bench", "compare", one, other, option, file]) == 2
            assert "would replace a file that this command reads" in capsys.readouterr().err
    assert Path(one).read_text() == Path(other).read_text() == before


def test_a_byte_order_mark_is_no_damage(tmp_path: Path, capsys: Capture) -> None:
    one = write(tmp_path / "a.json", good())
    Path(one).write_text("\ufeff" + Path(one).read_text())
    assert main(["bench", "compare", one, one]) == 0
    capsys.readouterr()


def test_a_comparison_is_written_too(tmp_path: Path, capsys: Capture) -> None:
    one = write(tmp_path / "a.json", good())
    words = ["bench", "compare", one, one, "--json", "-", "--markdown", "c.md"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "bench changes"
    assert "step" in (tmp_path / "c.md").read_text()


def test_a_rule_that_could_not_be_judged_is_exit_four(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", good())
    assert main(["bench", "compare", one, one, "--fail-if", "alloc_retries > +1"]) == 0
    rows = [row.model_copy(update={"turns_ms": row.turns_ms[:2]}) for row in GOOD]
    few = write(tmp_path / "b.json", good(rows=rows))
    assert main(["bench", "compare", one, few, "--fail-if", "step_ms > +3%"]) == 4


@pytest.mark.parametrize("rule", ["step_ms > +3%", "over_baseline > +3%"])
def test_a_rule_about_a_row_that_is_gone_is_exit_four(tmp_path: Path, rule: str) -> None:
    one = write(tmp_path / "a.json", good())
    fewer = write(tmp_path / "b.json", good(rows=GOOD[:-1], comparisons=[]))
    assert len(GOOD) > 1
    assert main(["bench", "compare", one, fewer, "--fail-if", rule]) == 4
    assert main(["bench", "compare", one, fewer]) == 0


def test_another_format_and_another_shape_are_exit_two(tmp_path: Path, capsys: Capture) -> None:
    one = write(tmp_path / "a.json", good())
    future = tmp_path / "b.json"
    future.write_text(json.dumps(json.loads(bench_json(good())) | {"format": 2}))
    assert main(["bench", "compare", one, str(future)]) == 2
    assert "has format 2, and this dflash reads format 1" in error(capsys)
    shapes = {"made-up-3072": {"token_budget": 4096}}
    other = write(tmp_path / "c.json", good(shapes=shapes))
    assert main(["bench", "compare", one, other]) == 2
    assert "shape made-up-3072 is not the same in both" in error(capsys)


@pytest.mark.parametrize("damaged", ["[" * 200_000, '{"format": ' + "9" * 5000 + "}", "no rows"])
def test_a_damaged_file_is_exit_two_with_its_name_and_no_crash_file(
    tmp_path: Path, capsys: Capture, damaged: str
) -> None:
    one = write(tmp_path / "a.json", good())
    content = json.loads(bench_json(good()))
    del content["rows"]
    (tmp_path / "b.json").write_text(json.dumps(content) if damaged == "no rows" else damaged)
    assert main(["bench", "compare", one, "b.json"]) == 2
    what, hint = error(capsys).splitlines()
    assert what.startswith("error: b.json is not a bench: ")
    assert hint.startswith("hint: dflash bench --json FILE writes one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_another_machine_is_judged_only_when_asked(tmp_path: Path, capsys: Capture) -> None:
    one = write(tmp_path / "a.json", good())
    other = write(tmp_path / "b.json", good(device="Another GPU"))
    rule = ["--fail-if", "peak_reserved_gib > +3%"]
    assert main(["bench", "compare", one, other]) == 0
    assert "Another GPU" in capsys.readouterr().out
    assert main(["bench", "compare", one, other, *rule]) == 2
    assert "--other-machine" in error(capsys)
    assert main(["bench", "compare", one, other, *rule, "--other-machine"]) == 0


def test_a_mistake_in_a_rule_is_named_before_anything_is_written(
    tmp_path: Path, capsys: Capture
) -> None:
    one = write(tmp_path / "a.json", good())
    words = ["bench", "compare", one, one, "--fail-if", "step_ms > 3%", "--json", "c.json"]
    assert main(words) == 2
    said = error(capsys)
    assert "at character 11: a change has a sign" in said
    assert "write +3%" in said
    assert not (tmp_path / "c.json").exists()
