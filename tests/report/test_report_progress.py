"""Progress shows a run to people: live on a terminal, plain lines elsewhere."""

import io
import json
import re
import time
from typing import Literal

import pytest

from dflash.errors import UsageError
from dflash.records import EvalRecord, EventRecord, StepRecord
from dflash.report.lines import record_line
from dflash.report.progress import JsonProgress, PlainProgress, RunClock, make_progress
from dflash.report.screen import ScreenProgress

STEP = StepRecord(
    step=40, loss=3.25, accepted_tokens_per_block=1.75, lr=5e-4, grad_norm=0.5, tokens=80_000,
    tokens_per_s=15_000, padding_share=0.021, step_s=0.2, wait_target_s=0.05,
    wait_drafter_s=0.02, wait_data_s=0.0, allocated_gib={"cuda:1": 2.0, "cuda:0": 1.5},
    rss_gib=0.75,
)  # fmt: skip
EVAL = EvalRecord(
    step=50, tau=2.5, tau_per_prompt=[2.0, 3.0], accepted_per_position=[0.9, 0.6],
    tokens_per_s_drafter=1234.0, tokens_per_s_plain=1000.0, speedup=1.234, num_prompts=2,
    max_new_tokens=8,
)  # fmt: skip
EVENT = EventRecord(step=60, name="checkpoint", detail={"path": "step-60", "seconds": 2})


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def test_a_step_is_one_line_of_named_figures() -> None:
    assert record_line(STEP, total_steps=400) == (
        "step 40/400 | loss 3.2500 | accepted 1.75 | lr 5.00e-04 | norm 0.50 | tok/s 15,000"
        " | padding 2.1% | wait data 0%, target 25%, drafter 10%"
        " | memory cuda:0 1.5 GiB, cuda:1 2.0 GiB, process 0.8 GiB"
    )


def test_a_figure_that_was_not_measured_is_not_shown() -> None:
    bare = StepRecord(step=1, loss=1.0, lr=1.0, grad_norm=1.0)
    line = record_line(bare)
    assert "accepted" not in line
    assert "wait data 0.00 s" in line


def test_an_evaluation_shows_tau_and_the_speed_up() -> None:
    assert record_line(EVAL) == (
        "step 50 | tau 2.50 over 2 prompts | 1,234 tok/s with the drafter, 1,000 without: 1.23x"
    )
    alone = EVAL.model_copy(update={"tokens_per_s_plain": None, "speedup": None})
    assert record_line(alone).endswith("1,234 tok/s with the drafter")


def test_an_event_shows_its_details() -> None:
    assert record_line(EVENT) == "step 60 | checkpoint: path=step-60, seconds=2"
    assert record_line(EventRecord(step=0, name="start")) == "step 0 | start"


def test_what_an_event_nests_is_written_in_words() -> None:
    drafters = [{"warm_up_s": 0.020617, "num_graphs": 0}, {"warm_up_s": 12345.678, "kept": True}]
    detail = {
        "mode": "eager", "elapsed_s": 0.0301, "sealed": False, "drafters": drafters, "left": [],
        "changed": {"optim.lr": "0.003 -> 0.001"}, "why": None,
    }  # fmt: skip
    assert record_line(EventRecord(step=6, name="warm_up", detail=detail)) == (
        "step 6 | warm_up: mode=eager, elapsed_s=0.0301, sealed=no,"
        " drafters=(warm_up_s 0.02062, num_graphs 0), (warm_up_s 12,346, kept yes), left=none,"
        " changed=(optim.lr 0.003 -> 0.001), why=none"
    )


def test_without_a_terminal_there_are_plain_lines() -> None:
    stream = io.StringIO()
    with make_progress("auto", total_steps=400, stream=stream) as progress:
        progress.say("warming up")
        progress.write(STEP)
        progress.write(EVAL)
    assert isinstance(progress, PlainProgress)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "warming up"
    assert lines[1].startswith("step 40/400 | ")
    assert lines[1].endswith(" | left 0:01:12")  # 360 steps of 0.2 s
    assert len(lines) == 3
    assert "\x1b" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress("auto", stream=Terminal()), PlainProgress)


def test_a_terminal_gets_a_live_screen_with_every_figure(terminal: Terminal) -> None:
    with make_progress("auto", total_steps=400, stream=terminal) as progress:
        progress.write(EVAL)
        progress.write(STEP)
        progress.write(EVENT)
        progress.say("done")
    assert isinstance(progress, ScreenProgress)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    for text in (
        "step 40/400", "3.2500", "1.75", "15,000", "2.1%", "target 25%", "cuda:1 2.0 GiB",
        "left 0:01:12", "step 50: tau 2.50", "checkpoint: path=step-60", "done",
    ):  # fmt: skip
        assert text in shown, text


def test_a_screen_is_taken_down_when_the_run_fails(terminal: Terminal) -> None:
    def run() -> None:
        with make_progress("rich", stream=terminal) as progress:
            progress.write(STEP)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_the_best_evaluation_stays_on_the_screen(terminal: Terminal) -> None:
    with make_progress("rich", stream=terminal) as progress:
        progress.write(EVAL)
        progress.write(EVAL.model_copy(update={"step": 55, "tau": 2.0}))
        progress.write(STEP)
    assert "step 50: tau 2.50" in terminal.getvalue()
    assert "step 55: tau 2.00" not in terminal.getvalue()


def test_json_progress_is_the_records_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with make_progress("json", stream=stream) as progress:
        progress.write(STEP)
        progress.say("talk")
    assert isinstance(progress, JsonProgress)
    assert StepRecord.model_validate(json.loads(stream.getvalue())) == STEP
    assert capsys.readouterr().err == "talk\n"


def test_no_progress_is_silent() -> None:
    stream = io.StringIO()
    with make_progress("none", stream=stream) as progress:
        progress.write(STEP)
        progress.say("talk")
    assert stream.getvalue() == ""


def test_an_unknown_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--progress fancy: must be one of auto, rich, plain"):
        make_progress("fancy")  # type: ignore[arg-type]


def test_the_time_left_follows_the_pace_since_the_first_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([100.0, 130.0, 160.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = RunClock(100)
    at = [STEP.model_copy(update={"step": step}) for step in (40, 50, 100)]
    assert clock.left_s(at[0]) == 0.2 * 60  # the first record's own step time
    assert clock.left_s(at[1]) == 3.0 * 50  # 30 s for 10 steps
    assert clock.left_s(at[2]) == 0.0


def test_a_run_without_an_end_has_no_time_left() -> None:
    assert RunClock(None).left_s(STEP) is None


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_the_length_of_a_run_may_be_learnt_later(
    kind: Literal["plain", "rich"], terminal: Terminal
) -> None:
    with make_progress(kind, stream=terminal) as progress:
        progress.expect(400)
        progress.write(STEP)
    assert "step 40/400" in terminal.getvalue()
    assert "left 0:01:12" in terminal.getvalue()
