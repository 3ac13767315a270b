"""A bench as lines: complete, narrow, no name cut, nothing shown that is not there."""

import shlex
import subprocess

import pytest
from bench_samples import MESSAGE, compared, estimate, failed, measured, sample, skipped

from dflash.measurement import Bench, Estimate, Row
from dflash.report.bench import bench_lines, style_of
from dflash.report.layout import WIDTH, command_lines
from dflash.report.numbers import estimate_text, number, rough


def bench(*rows: Row, **changes: object) -> Bench:
    return sample().model_copy(
        update={"rows": list(rows), "comparisons": [], "scaling": [], "weather": None} | changes
    )


def line_of(lines: list[str], start: str, *, after: str = "speed") -> list[str]:
    """Words of the first line that begins with *start* below the table called *after*."""
    begin = next(at for at, line in enumerate(lines) if line.strip().startswith(after))
    return next(line.split() for line in lines[begin:] if line.split()[:1] == [start])


def test_lines_stay_narrow_and_say_what_happened_to_every_mode() -> None:
    lines = bench_lines(sample())
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert line_of(lines, "graphed") == [
        "graphed", "25,600", "±0.2%", "120.0", "118.8", "121.4", "157.2", "0.645", "±0.1%", "faster"
    ]  # fmt: skip
    assert line_of(lines, "reduce-overhead") == ["reduce-overhead", "failed:", "cudagraph-trees"]
    assert line_of(lines, "compiled") == ["compiled", "skipped"]
    assert line_of(lines, "eager")[-1] == "baseline"
    assert f"reduce-overhead failed during turn: RuntimeError: {MESSAGE}"[:300] in text
    assert "dflash explain cudagraph-trees" in text
    assert "compiled skipped: the memory plan says 151.0 GiB, the GPU has 139.8" in text
    assert "warmed: another process used the GPU in two turns" in text


def test_lines_say_start_up_memory_and_counts_apart_from_speed() -> None:
    lines = bench_lines(sample())
    assert line_of(lines, "warmed", after="start-up s") == [
        "warmed", "31.6", "9.25", "20.1", "15.2", "7/9", "1.50", "1,234", "steps"
    ]  # fmt: skip
    assert line_of(lines, "eager", after="start-up s")[1:] == ["31.6", "9.25", "20.1"]
    assert line_of(lines, "reduce-overhead", after="start-up s")[1:] == ["44.0", "9.00", "33.0"]
    memory = line_of(lines, "warmed", after="memory GiB")
    assert memory == ["warmed", "23.5", "25.1", "4.40", "27.2", "3.90", "26.0"]
    assert line_of(lines, "graphed", after="counts") == ["graphed", "0", "0", "0", "0", "4", "0"]


def test_lines_say_on_what_and_how_it_was_measured() -> None:
    text = " ".join(" ".join(bench_lines(sample())).split())
    for told in (
        "Made-up GPU, torch 2.11.0+cu130, commit 0123456",
        "bf16 matrix product of 8192 x 8192 in the same run: 705.0 TFLOP/s",
        "measuring costs 0.31% of a step (-0.12% to 0.74%)",
        "verdicts at 1.0%, 8 pairs of turns",
        "1,755 MHz (1,410 to 1,980), 688 W, at most 71 C, at its power limit 37% of the time; 900",
        "?? throttled: hardware slowdown, in 12% of the samples",
        "variable eager: step time 1.040 ±0.1% of drafter-step made-up-3072 fixed eager, slower",
    ):
        assert told in text


def test_a_curve_is_a_table_with_its_exponent_and_its_wall() -> None:
    lines = bench_lines(sample())
    rows = [line.split() for line in lines[lines.index("") :]]
    assert ["16,384", "655.5", "62.0", "63.5"] in rows
    assert ["49,152", "151.0", "skipped"] in rows
    text = "\n".join(lines)
    assert "step time grows as token_budget to the power 1.14 (1.11 to 1.17)" in text
    assert "by the memory plan token_budget = 49,152 is the first that does not fit" in text
    assert "made-up-8192, fixed" not in text  # its one row is in the curve
    none = sample().scaling[0].model_copy(update={"peak_gib": [None] * 4})
    bare = bench_lines(sample().model_copy(update={"scaling": [none]}))
    assert not any("peak GiB" in line for line in bare)


def test_a_figure_that_no_row_has_takes_no_column() -> None:
    bare = Row(case="mask", shape="tiny", mode="launched", state="measured", unit="mask")
    lines = bench_lines(bench(bare, matrix_tflops=None, overhead_share=None))
    text = "\n".join(lines)
    for absent in ("memory", "start-up", "counts", "None", "TFLOP", "nan"):
        assert absent not in text
    assert "  launched" in lines


def test_units_other_than_tokens_are_named() -> None:
    assert "batch/s" in "\n".join(bench_lines(bench(measured("eager", unit="batch"))))


@pytest.mark.parametrize("length", [15, 40, 66])
def test_a_long_name_is_never_cut(length: int) -> None:
    name = "m" * length
    lines = bench_lines(
        bench(measured("eager"), measured("eager").model_copy(update={"mode": name}))
    )
    assert max(map(len, lines)) <= WIDTH
    begins = [line.split()[0] for line in lines if line.strip().startswith("mmm")]
    assert set(begins) == {name}
    words = [word for line in lines for word in line.split()]
    assert words.count("243.7") == 2  # the longest step of both, in whichever part of the table


def test_a_verdict_stays_beside_its_ratio() -> None:
    eager, graphed = measured("eager"), measured("graphed", per_s=estimate(25_600.0, 0.3))
    graphed = graphed.model_copy(update={"mode": "captured-compiled"})
    wide = compared(graphed, eager).model_copy(update={"ratio": estimate(0.6452, 0.3)})
    lines = bench_lines(bench(eager, graphed, comparisons=[wide]))
    assert max(map(len, lines)) <= WIDTH
    assert any(
        line.split() == ["captured-compiled", "0.645", "-30%+30%", "faster"] for line in lines
    )


def test_an_interrupted_bench_says_so_first() -> None:
    lines = bench_lines(bench(measured("eager"), complete=False))
    assert lines[2].startswith("?? incomplete")
    assert style_of(lines[2]) == "yellow"


def test_what_stands_out() -> None:
    lines = bench_lines(sample())
    styles = {line.strip("!?- ").split()[0]: style_of(line) for line in lines if line[:1].strip()}
    assert styles["reduce-overhead"] == "bold red"
    assert styles["compiled"] == "dim"
    assert styles["throttled:"] == "yellow"
    assert styles["drafter-step,"] == "bold"
    assert style_of("  eager") == ""
    assert style_of("ok graphed/eager >= 3 is met") == "green"


def test_terminal_codes_in_a_message_are_not_passed_on() -> None:
    row = sample().rows[2]
    assert row.failed is not None
    bad = row.failed.model_copy(update={"message": "\x1b[31mred\x07" + "long " * 500})
    lines = bench_lines(bench(row.model_copy(update={"failed": bad})))
    assert not any(set(line) & {"\x1b", "\x07"} for line in lines)
    assert len(lines) < 30


def test_modes_skipped_for_one_reason_are_told_together() -> None:
    rows = [skipped().model_copy(update={"mode": mode}) for mode in ("warmed", "graphed")]
    other = skipped().model_copy(update={"why": "no g++"})
    lines = bench_lines(bench(rows[0], other, rows[1], failed()))
    told = [line for line in lines if line.startswith("--")]
    assert (
        told[0] == "-- warmed, graphed skipped: the memory plan says 151.0 GiB, the GPU has 139.8"
    )
    assert told[1] == "-- compiled skipped: no g++"


def test_the_command_can_be_pasted() -> None:
    command = "dflash bench drafter-step " + "--mode graphed " * 9 + "--expect 'graphed/eager >= 3'"
    lines = command_lines(command)
    assert len(lines) > 2
    assert max(map(len, lines)) <= WIDTH
    assert all(line.endswith("\\") for line in lines[:-1])
    script = 'dflash() { printf "%s\\n" "$@"; }\n' + "\n".join(lines)
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)  # noqa: S607
    assert ran.stdout.splitlines() == shlex.split(command)[1:]
    assert command_lines("dflash 'bench") == ["  dflash 'bench"]


def test_a_second_baseline_is_told_below_the_table() -> None:
    eager, warmed, graphed = (measured(mode) for mode in ("eager", "warmed", "graphed"))
    both = [compared(graphed, eager), compared(graphed, warmed, verdict="same")]
    lines = bench_lines(bench(eager, warmed, graphed, comparisons=both))
    assert line_of(lines, "graphed")[-1] == "faster"
    text = " ".join(" ".join(lines).split())
    assert "fixed graphed: step time 0.8955 ±0.1% of drafter-step made-up-3072 fixed warmed" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (0, "0"), (7, "7"), (12345, "12,345"), (133.31, "133.3"), (13.331, "13.33"),
        (0.01524, "0.0152"), (16500.4, "16,500"), (1_234_567.0, "1.23M"), (float("inf"), "inf"),
        (0.0, "0"), (0.00003, "3e-05"), (-0.00003, "-3e-05"), (0.00012, "0.0001"),
    ],
)  # fmt: skip
def test_a_number_has_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(139.81, "139.8"), (9.251, "9.25"), (0.0512, "0.0512"), (38, "38")]
)
def test_seconds_and_gib_are_rough(value: float, text: str) -> None:
    assert rough(value) == text


def test_the_wider_side_of_an_interval_is_shown() -> None:
    assert estimate_text(Estimate(value=100.0, low=99.0, high=103.0)) == "100.0 ±3.0%"
    assert estimate_text(Estimate(value=100.0, low=100.0, high=100.0)) == "100.0"
    assert estimate_text(Estimate(value=0.8, low=0.6, high=0.88)) == "0.8000 -25%+10%"
    assert estimate_text(None) == ""
