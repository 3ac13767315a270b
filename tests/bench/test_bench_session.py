"""A bench of a case that says how long its steps take: rows, verdicts, groups, and every end."""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bench_subjects import Timed

from dflash.errors import MissingError, UsageError
from dflash.measurement import Bench, Weather
from dflash.report.bench import bench_lines
from dflash_bench.cases._case import Case, Setting
from dflash_bench.session import BenchPlan, run_bench, setting_of, settled_devices
from dflash_bench.shapes import named_shape
from dflash_bench.weather import Watch

FAKE = Case(name="fake", help="says how long it takes", make=Timed, modes=("base", "same", "quick"))
PLAN = BenchPlan(cases=("fake",), shapes=(named_shape("tiny"),), limit_s=20.0, max_time_s=60.0)

Run = Callable[..., Bench]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    def bench(case: Case = FAKE, plan: BenchPlan = PLAN) -> Bench:
        monkeypatch.setattr("dflash_bench.selection.all_cases", lambda: {"fake": case})
        return run_bench(plan, say=lambda _: None)

    return bench


@pytest.fixture(scope="module")
def usual() -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_bench.selection.all_cases", lambda: {"fake": FAKE})
        return run_bench(PLAN, say=lambda _: None)


def children_of_this_process() -> str:
    asked = ["ps", "--ppid", str(os.getpid()), "-o", "args="]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return "\n".join(line for line in shown.splitlines() if "spawn_main" in line)


def test_every_mode_is_a_row_and_is_compared_with_the_first(usual: Bench) -> None:
    found = usual
    base, same, quick = found.rows
    assert [row.state for row in found.rows] == ["measured"] * 3
    assert base.per_s is not None
    assert base.per_s.low <= 10_000 * 1.001
    assert base.per_s.high >= 10_000 / 1.001  # 100 units in 10 ms
    assert quick.step_ms is not None
    assert quick.step_ms.median == pytest.approx(5.0, rel=0.002)
    assert quick.loss_against_eager is None  # there is no mode of that name
    verdicts = {one.row: one.verdict for one in found.comparisons}
    assert verdicts == {same.name: "same", quick.name: "faster"}
    assert all(one.baseline == base.name and one.pairs == 6 for one in found.comparisons)
    assert found.complete


def test_no_matrix_product_is_told_where_none_in_bf16_was_made(usual: Bench) -> None:
    assert usual.matrix_tflops is None
    assert not any("matrix product" in text for text in bench_lines(usual))


def test_start_up_is_told_apart_and_pays_back(usual: Bench) -> None:
    base, same, quick = usual.rows
    assert base.start_up is not None
    assert same.start_up is not None
    assert same.start_up.pays_back_after_steps is None  # as quick, but for chance
    assert quick.start_up is not None
    assert base.start_up.first_steps_ms == [1000.0, 500.0]
    assert (base.start_up.build_s, base.start_up.warm_up_s) == (0.5, 0.25)
    assert base.start_up.pays_back_after_steps is None
    later = quick.start_up.first_step_s - base.start_up.first_step_s + 0.005
    assert quick.start_up.pays_back_after_steps == pytest.approx(max(0.0, later / 0.005), abs=3)


def test_turns_go_on_until_a_rate_can_be_made_however_little_time_there_is(run: Run) -> None:
    plan = replace(PLAN, turn_steps=1, min_pairs=1, max_time_s=0.0)
    found = run(replace(FAKE, modes=("base", "same")), plan)
    assert [row.state for row in found.rows] == ["measured"] * 2
    assert len(found.rows[0].turns_ms) == 2  # one has no spread
    assert all(row.per_s is not None and row.why == "" for row in found.rows)


def test_what_measuring_costs_is_a_share_of_a_bare_step(usual: Bench) -> None:
    costs = usual.overhead_share
    assert costs is not None
    assert costs.value == pytest.approx(0.25, abs=0.01)
    assert costs.low < costs.value < costs.high
    # nobody had a turn beside those that found it out, so they are none of the mode's own
    assert {len(row.turns_ms) for row in usual.rows} == {6}


def test_what_measuring_costs_is_not_asked_of_turns_of_seconds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_bench.overhead.LONGEST_TURN_MS", 99.0)  # ten steps of ten
    assert run(replace(FAKE, modes=("base",))).overhead_share is None


def test_modes_that_fail_are_rows_with_their_failure_mode_and_the_rest_goes_on(run: Run) -> None:
    modes = ("base", "trees", "crash", "early", "quick")
    found = run(replace(FAKE, modes=modes))
    base, trees, crash, early, quick = found.rows
    assert [row.state for row in found.rows] == ["measured", *["failed"] * 3, "measured"]
    assert trees.failed is not None
    assert crash.failed is not None
    assert (trees.failed.type, trees.failed.during) == ("AssertionError", "turn")
    assert trees.failed.slug == "cudagraph-trees"
    assert "SIGABRT" in crash.failed.message
    assert "Fatal Python error: Aborted" in crash.failed.traceback
    assert [row.loss for row in (trees, crash, early)] == [2.1, None, 2.1]
    assert early.start_up is not None
    assert (early.start_up.build_s, early.start_up.first_step_s) == (0.5, None)
    assert [one.row for one in found.comparisons] == [quick.name]
    assert base.name == "fake tiny fixed base"
    assert found.complete


def test_a_mode_that_is_quick_but_for_one_step_a_turn_is_not_faster(run: Run) -> None:
    found = run(replace(FAKE, modes=("base", "halting")))
    (halting,) = found.comparisons
    assert halting.slow_steps_count
    assert halting.verdict == "slower"
    assert halting.ratio.value == pytest.approx(2.9, rel=0.01)  # (9 + 20) / 10
    shown = " ".join(" ".join(bench_lines(found)).split())
    assert "the ratio is of all steps: 29.0" in shown


def test_an_interrupt_keeps_what_is_known_and_leaves_no_child(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_bench.turns.GRACE_S", 2.0)
    before = signal.getsignal(signal.SIGINT)
    found = run(replace(FAKE, modes=("base", "interrupt", "quick")))
    assert signal.getsignal(signal.SIGINT) == before
    assert not found.complete
    base, interrupting, quick = found.rows
    assert base.state == "measured"
    assert [len(turn) for turn in base.turns_ms] == [PLAN.turn_steps]
    assert interrupting.state == quick.state == "skipped"
    assert "interrupted" in quick.why
    assert (base.loss, interrupting.loss, quick.loss) == (2.0, None, 2.1)
    assert children_of_this_process() == ""


def test_a_second_interrupt_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_bench.turns.GRACE_S", 300.0)
    found = run(replace(FAKE, modes=("base", "interrupt twice")))
    assert not found.complete
    assert found.rows[0].state == "measured"
    assert found.wall_s < 200
    assert children_of_this_process() == ""


def test_groups_that_fit_take_turns_with_a_baseline_that_stays_alive(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "free_gib", lambda *_: 20.0)
    case = replace(FAKE, make=partial(Timed, log=tmp_path / "log"), planned_gib=lambda _: 5.0)
    plan = replace(PLAN, min_pairs=4, max_time_s=0.001)
    found = run(case, plan)
    told = (tmp_path / "log").read_text().split()
    words = [word for word in told if not word.startswith("*")]
    # 5 * 1.35 + 0.5 each on a CPU: two of them fit at a time
    one, other = "base same same base base same same base", "base quick quick base " * 2
    overhead = "same " * 6
    assert sorted(words[:2]) == ["+base", "+same"]  # they are built at the same time
    assert words[2:] == f"{one} {overhead} -same +quick <base {other} -quick -base".split()
    assert [one.pairs for one in found.comparisons] == [4, 4]
    assert len(found.rows[0].turns_ms) == 8
    # "quick" has imported what it needs before others are timed, and builds when they are over
    assert told.index("*quick") < told.index("base")


@pytest.mark.parametrize("mode", ["crowded", "crowded-early", "crowded-late"])
def test_a_mode_that_others_left_no_memory_is_measured_again_by_itself(
    *, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    own: set[int] = set()
    monkeypatch.setattr("dflash_bench.part.Numbered", lambda make, **_: make)
    monkeypatch.setattr(Watch, "weather", lambda _, numbers: own.update(numbers) or Weather())
    make = partial(Timed, log=tmp_path / "log")
    found = run(replace(FAKE, make=make, modes=("base", mode, "same")))
    assert len(own) == 4  # the one that ran out of memory is nobody else's either
    base, crowded, same = found.rows
    assert crowded.state == "measured"
    assert crowded.step_ms is not None
    assert crowded.step_ms.median == pytest.approx(10.0, rel=0.01)
    assert "it ran out of memory beside base, so it was measured alone" in crowded.why
    assert [one.row for one in found.comparisons] == [same.name]
    assert base.why == ""
    told = (tmp_path / "log").read_text().split()
    assert told.index("-base") < len(told) - 1 - told[::-1].index(f"+{mode}")
    assert told.count(f"+{mode}") == 2
    assert "pid" in crowded.more  # it was asked at its end, too


def test_a_baseline_that_others_left_no_memory_is_measured_again_and_compared_with_nothing(
    run: Run, tmp_path: Path
) -> None:
    make = partial(Timed, log=tmp_path / "log")
    found = run(replace(FAKE, make=make, modes=("crowded", "same", "quick")))
    assert [row.state for row in found.rows] == ["measured"] * 3
    told = "it ran out of memory beside others, so it was measured alone and nothing is compared"
    assert told in found.rows[0].why
    assert [row.why for row in found.rows[1:]] == ["", ""]
    assert found.comparisons == []
    assert min(len(row.turns_ms) for row in found.rows) >= PLAN.min_pairs


def test_a_mode_that_has_no_memory_by_itself_is_not_measured_again(
    run: Run, tmp_path: Path
) -> None:
    make = partial(Timed, log=tmp_path / "log")
    (tmp_path / "log").write_text("+somebody-else ")
    found = run(replace(FAKE, make=make, modes=("crowded",)))
    assert [row.state for row in found.rows] == ["failed"]
    assert (tmp_path / "log").read_text().split().count("+crowded") == 1


def test_what_cannot_fit_is_skipped_with_its_numbers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "free_gib", lambda *_: 25.0)
    sizes = {"base": 30.0, "same": 5.0, "quick": 5.0}
    found = run(replace(FAKE, planned_gib=lambda setting: sizes[setting.mode]))
    assert [row.state for row in found.rows] == ["skipped", "measured", "measured"]
    assert "needs 30.0 GiB by the memory plan, and cpu has 25.0 GiB free" in found.rows[0].why
    assert [one.baseline for one in found.comparisons] == [found.rows[1].name]


def test_a_shape_that_a_cpu_has_no_memory_for_is_skipped_and_never_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("dflash_bench.child.Child.start", start)
    monkeypatch.setattr("dflash_bench.host_memory.free_gib", lambda: 24.0)
    shapes = (named_shape("packed-49k"),)
    plan = replace(PLAN, cases=("drafter-step",), shapes=shapes, modes=("eager",), devices=("cpu",))
    (row,) = run_bench(plan, say=lambda _: None).rows
    assert row.state == "skipped"
    assert "GiB by the memory plan, and cpu has 24.0 GiB free" in row.why


def test_what_speaks_against_a_mode_is_why_it_is_skipped(run: Run) -> None:
    def why_not(setting: Setting) -> str:
        return "not on a Sunday" if setting.mode == "same" else ""

    found = run(replace(FAKE, why_not=why_not))
    assert [row.state for row in found.rows] == ["measured", "skipped", "measured"]
    assert found.rows[1].why == "not on a Sunday"


def test_only_the_modes_that_were_asked_for_are_rows(run: Run) -> None:
    case = replace(FAKE, why_not=lambda _: "never mind")
    plan = replace(PLAN, modes=("quick", "same"), lengths=("fixed", "variable"))
    found = run(case, plan)
    names = [(row.mode, row.lengths) for row in found.rows]
    both = [("same", "fixed"), ("quick", "fixed")]
    assert names == [*both, *((mode, "variable") for mode, _ in both)]
    assert len({row.name for row in found.rows}) == 4


def test_a_gpu_that_is_required_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(MissingError):
        settled_devices(replace(PLAN, require_gpu=True))
    with pytest.raises(UsageError, match="no device 'cuda:0'"):
        settled_devices(replace(PLAN, devices=("cuda:0",)))


def test_drafters_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    plan = replace(PLAN, drafters=3)
    assert settled_devices(plan) == ("cuda:0", "cuda:1", "cuda:0")
    assert settled_devices(replace(plan, devices=("cuda:1",))) == ("cuda:1",) * 3
    assert settled_devices(replace(plan, drafters=1)) == ("cuda:0",)


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(0.02, (10, 2, 8)), (0.8, (5, 1, 4)), (1.3, (3, 1, 4)), (30.0, (2, 1, 4))],
)
def test_long_steps_make_short_turns_and_settle_in_few(
    step_s: float, steps: tuple[int, int, int]
) -> None:
    flop = step_s * 5e14  # what a GPU is taken to do in that time
    case = replace(FAKE, flop=lambda _: flop)
    (shape,) = PLAN.shapes
    setting = setting_of(PLAN, case, shape=shape, lengths="fixed", devices=("cuda:0",))
    assert (setting.turn_steps, setting.lead_in_steps, setting.settling_steps) == steps
