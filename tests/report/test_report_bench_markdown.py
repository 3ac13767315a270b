"""A bench and a comparison as markdown; a comparison as lines."""

import re

import pytest
from bench_samples import failed, sample

from dflash.measurement import Change, Changes, Estimate
from dflash.report.bench import style_of
from dflash.report.bench_changes import change_lines, changes_markdown
from dflash.report.bench_markdown import bench_markdown, code, plain
from dflash.report.layout import WIDTH

ROW = "drafter-step qwen3-8b-3072 fixed reduce-overhead"
CHANGES = Changes(
    before="before.json (commit 0123456, 2026-01-02)",
    after="after.json (commit 89abcde, 2026-01-03)",
    differences=["torch differs: 2.11.0 before, 2.12.1 after"],
    changes=[
        Change(
            row=ROW,
            figure="step_ms",
            before=133.3,
            after=140.1,
            ratio=Estimate(value=1.051, low=1.048, high=1.054),
            verdict="worse",
            regression=True,
            rule="step_ms > +3%",
        ),
        Change(row=ROW, figure="peak_reserved_gib", before=25.1, after=25.1, verdict="same"),
    ],
    notes=["graphed is in the later one only"],
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [[cells(line) for line in block.splitlines()] for block in blocks]


def test_every_table_has_one_width_and_every_mode_its_line() -> None:
    text = bench_markdown(sample())
    found = tables(text)
    for table in found:
        assert {len(row) for row in table} == {len(table[0])}
        assert re.fullmatch(r"---(,---:)*", ",".join(table[1]))
    modes = [row[0] for row in found[0][2:]]
    assert modes == ["eager", "compiled", "reduce-overhead", "warmed", "graphed"]
    graphed = dict(zip(found[0][0], found[0][-1], strict=True))
    assert graphed["tok/s"] == "25,600 ±0.2%"
    assert graphed["reserved GiB"] == "25.1"
    assert graphed["first step s"] == "31.6"
    assert found[0][4][1] == "failed: cudagraph-trees"


def test_tables_stand_alone_between_empty_lines() -> None:
    lines = bench_markdown(sample()).splitlines()
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|"):
            assert above.startswith("|") or not above
            assert below.startswith("|") or not below


def test_messages_are_not_markup() -> None:
    bad = failed()
    assert bad.failed is not None
    told = bad.failed.model_copy(update={"message": "a|b <b>*x*</b> `y` @someone #12 [z](u)\nmore"})
    rows = [bad.model_copy(update={"failed": told})]
    text = bench_markdown(
        sample().model_copy(update={"rows": rows, "comparisons": [], "scaling": []})
    )
    line = next(line for line in text.splitlines() if "someone" in line)
    assert not re.search(r"(?<!\\)[|<>*`#\[\]](?!\*|failed)", line.removeprefix("- **failed** "))
    assert "@someone" not in line


def test_the_command_is_in_a_fence_that_it_cannot_leave() -> None:
    assert code("a ``` b") == ["````", "a ``` b", "````"]
    assert sample().command in bench_markdown(sample())
    assert plain("one\n  two") == "one two"


def test_a_comparison_is_narrow_and_names_the_rule_that_broke() -> None:
    lines = change_lines(CHANGES)
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert "step_ms 133.3 140.1 1.051 ±0.3% REGRESSION" in text
    assert "peak_reserved_gib 25.1 25.1 same" in text.replace("25.10", "25.1")
    assert f"!! {ROW}: step_ms breaks 'step_ms > +3%', 1.051 ±0.3% of before" in text
    assert "?? torch differs: 2.11.0 before, 2.12.1 after" in text
    assert "-- graphed is in the later one only" in text
    assert ROW in lines
    (broken,) = [line for line in lines if line.startswith("!!")]
    assert style_of(broken) == "bold red"


def test_a_rule_that_could_not_be_judged_is_not_passed_over() -> None:
    asked = {"regression": None, "rule": "step_ms > +3%"}
    unsure = CHANGES.changes[0].model_copy(update=asked)
    lines = change_lines(CHANGES.model_copy(update={"changes": [unsure], "notes": []}))
    text = " ".join(" ".join(lines).split())
    assert f"?? {ROW}: step_ms cannot be judged by 'step_ms > +3%'" in text
    assert "1.051 ±0.3% undecided" in text
    assert "REGRESSION" not in text


@pytest.mark.parametrize("told", ["REGRESSION", "breaks", "torch differs", "later one only", ROW])
def test_a_comparison_in_markdown_says_the_same(told: str) -> None:
    text = changes_markdown(CHANGES)
    assert plain(told) in text
    (table,) = tables(text)
    assert table[2][0] == "step\\_ms"
