"""A diagnosis as lines, JUnit and one HTML page: complete, narrow, escaped."""

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from dflash.diagnose.findings import (
    Diagnosis,
    Finding,
    Launch,
    Mark,
    Rate,
    RunDiagnosis,
    Stall,
    Suffered,
    WatchDiagnosis,
)
from dflash.environment import environment
from dflash.report.diagnosis import (
    WIDTH,
    finding_lines,
    launch_line,
    run_lines,
    style_of,
    watch_lines,
)
from dflash.report.diagnosis_html import diagnosis_html
from dflash.report.junit import junit_xml
from dflash.report.lanes import lanes, memory_curves

MESSAGE = "AcceleratorError: CUDA error: <operation> not permitted & " + "long " * 60 + "\x1b[31m"


def mark(kind: str, thread: str, at_s: float, **detail: Any) -> Mark:  # noqa: ANN401 - JSON
    return Mark(kind=kind, thread=thread, at_s=at_s, detail=detail)


LAUNCH = Launch(
    variant="faulty",
    seed=3,
    end="cuda error",
    message=MESSAGE,
    thread="drafter-0",
    traceback="Traceback <most recent>",
    marks=[
        mark("compile", "MainThread", 2.0, for_s=1.5),
        mark("capture", "drafter-0", 3.0),
        mark("fail", "drafter-0", 3.1, error="<boom>"),
    ],
)


def finding(**changes: Any) -> Finding:  # noqa: ANN401 - its other fields
    facts: dict[str, Any] = {
        "slug": "capture-race",
        "title": "Both die.",
        "device": "gpu",
        "verdict": "reproduced",
        "why": "2 of 5",
        "expected": "reproduced",
        "expected_why": "torch 2.11 has this failure",
        "part": "whole",
        "measures": "threads that die",
        "unit": "threads",
        "faulty": Rate(shown=2, launches=5, at_least=0.076, at_most=0.811),
        "sound": Rate(shown=0, launches=5, at_least=0.0, at_most=0.451),
        "worst": 2.0,
        "best": 0.0,
        "remedy": "dflash.execution.graphs.capture",
        "remedy_verified": "unclear",
        "severity": "error",
        "launches": [LAUNCH],
    }
    return Finding(**(facts | changes))


def diagnosis(*findings: Finding) -> Diagnosis:
    where = environment(with_torch=False)
    return Diagnosis(
        torch="2.11.0", level="quick", environment=where, findings=list(findings), wall_s=1.0
    )


def test_lines_say_everything_and_stay_narrow() -> None:
    lines = finding_lines(finding())
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert lines[0] == "!! capture-race: reproduced"
    assert "2 of 5 (95 %: 7.6% to 81.1%)" in text
    assert "threads that die: 2 threads faulty, 0 threads remedied, limit 0 threads" in text
    assert "verified here: unclear" in text
    assert "cuda error in drafter-0: AcceleratorError: CUDA error: <operation>" in text
    assert len(launch_line("capture-race", LAUNCH)) <= WIDTH


@pytest.mark.parametrize(
    ("verdict", "style"),
    [("reproduced", "bold red"), ("not reproduced", "green"), ("inconclusive", "yellow")],
)
def test_a_verdict_stands_out(verdict: str, style: str) -> None:
    assert style_of(finding_lines(finding(verdict=verdict))[0]) == style


def test_lanes_are_threads_with_the_failure_last_and_on_top() -> None:
    picture = lanes(LAUNCH, title="a <title>")
    root = ET.fromstring(picture)  # noqa: S314 - our own
    texts = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert "a <title>" in texts
    assert texts.index("MainThread") < texts.index("drafter-0")
    assert "fail at 3.100 s: error=<boom>" in texts
    assert picture.index("#c8201e") > picture.index("#1f6fb2")
    assert lanes(LAUNCH.model_copy(update={"marks": []}), title="") == ""


def test_a_bar_is_as_long_as_what_it_stands_for() -> None:
    root = ET.fromstring(lanes(LAUNCH, title=""))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    widths = [
        float(rect.get("width", 0))
        for rect in root.iter(f"{space}rect")
        if rect.find(f"{space}title") is not None
    ]
    compiled, captured = widths
    assert compiled > 20 * captured


def test_memory_is_drawn_over_steps() -> None:
    launches = [
        LAUNCH.model_copy(
            update={
                "marks": [
                    mark("memory", "MainThread", 1.0, series=name, step=step, reserved=2**30 * step)
                    for step in range(3)
                ]
            }
        )
        for name in ("variable", "fixed", "fixed")
    ]
    picture = memory_curves(launches, title="memory")
    assert "reserved, variable" in picture
    assert "reserved, fixed" in picture
    assert picture.count("<polyline") == 2, "the second launch with a fixed shape is not drawn too"
    assert memory_curves([LAUNCH], title="") == ""


def test_notes_alone_are_no_timeline() -> None:
    noted = [mark("note", "MainThread", 1.0), mark("note", "drafter-0", 2.0)]
    assert lanes(LAUNCH.model_copy(update={"marks": noted}), title="") == ""
    replayed = [*noted, mark("replay", "drafter-0", 2.5)]
    assert "drafter-0" in lanes(LAUNCH.model_copy(update={"marks": replayed}), title="")


def test_the_page_escapes_what_programs_say() -> None:
    page = diagnosis_html(diagnosis(finding(), finding(slug="quiet", part=None, launches=[])))
    assert "<operation>" not in page
    assert "&lt;operation&gt; not permitted &amp;" in page
    assert '<a href="#quiet">' in page
    assert "Traceback &lt;most recent&gt;" in page


def test_junit_counts_and_holds_what_xml_can() -> None:
    verdicts = ("reproduced", "not reproduced", "not applicable", "inconclusive")
    found = [finding(slug=v, verdict=v, severity="none") for v in verdicts]
    found[0] = finding()
    suite = ET.fromstring(junit_xml(diagnosis(*found))).find("testsuite")  # noqa: S314 - our own
    assert suite is not None
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "1", "1"]
    (failure,) = suite.iter("failure")
    assert "reproduced: 2 of 5" in failure.get("message", "")
    assert "capture-race" in (failure.text or "")


def test_junit_is_xml_whatever_a_message_holds() -> None:
    found = finding(
        verdict="not reproduced", remedy_verified="no", remedy_why="\x1b[31ma\x07\udcff"
    )
    (failure,) = ET.fromstring(junit_xml(diagnosis(found))).iter("failure")  # noqa: S314 - ours
    assert failure.get("message") == "the remedy failed: a\\x07\\udcff"


def test_what_an_interrupt_left_out_is_told_by_every_report() -> None:
    stopped = diagnosis(finding()).model_copy(update={"complete": False, "missing": ["late-shape"]})
    suite = ET.fromstring(junit_xml(stopped)).find("testsuite")  # noqa: S314 - our own
    assert suite is not None
    assert (suite.get("tests"), suite.get("errors")) == ("2", "1")
    (left,) = suite.iter("error")
    assert "interrupted" in left.get("message", "")
    assert [case.get("name") for case in suite.iter("testcase")] == ["capture-race", "late-shape"]
    assert "Incomplete: interrupted before late-shape." in diagnosis_html(stopped)
    assert "ncomplete" not in diagnosis_html(diagnosis(finding()))


def test_a_remedied_program_that_fails_is_a_junit_failure_too() -> None:
    found = finding(verdict="not reproduced", remedy_verified="no", remedy_why="1 of 5")
    (failure,) = ET.fromstring(junit_xml(diagnosis(found))).iter("failure")  # noqa: S314 - ours
    assert failure.get("message") == "the remedy failed: 1 of 5"


def test_what_a_run_suffered_from_is_told_with_its_evidence() -> None:
    suffered = Suffered(slug="late-shape", title="A shape.", evidence=["one", "two"], remedy="r")
    lines = run_lines(RunDiagnosis(run_dir="runs/x", suffered=[suffered], notes=["it ended"]))
    assert [line.split() for line in lines] == [
        ["!!", "late-shape"],
        ["what", "A", "shape."],
        ["evidence", "one"],
        ["two"],
        ["remedy", "r"],
        ["note", "it", "ended"],
    ]
    assert run_lines(RunDiagnosis(run_dir="runs/x", suffered=[])) == ["ok runs/x: nothing found"]
    died = RunDiagnosis(run_dir="runs/x", suffered=[], notes=["it ended after step 2"])
    assert run_lines(died)[0] == "?? runs/x: no failure mode found"


STALL = Stall(at_s=2.0, still_s=2.0, stacks="")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"exit_code": 0}, "ok no failure mode was seen"),
        ({"exit_code": 3}, "?? no failure mode was seen, but its exit code is 3"),
        (
            {"exit_code": None, "signal": "SIGSEGV"},
            "?? no failure mode was seen, but it died of SIGSEGV",
        ),
        (
            {"exit_code": None, "signal": "SIGABRT", "ended_for_stall": True, "stalls": [STALL]},
            "?? no failure mode was seen, but it stood still and was ended",
        ),
        (
            {"exit_code": 0, "stalls": [STALL]},
            "?? no failure mode was seen, but it stood still for a while",
        ),
        (
            {"exit_code": 0, "died": ["drafter-0: ValueError: bad", "drafter-1: ValueError: bad"]},
            "?? no failure mode was seen, but an exception ended thread drafter-0: ValueError: bad",
        ),
        (
            {"exit_code": 0, "undiagnosed": "torch cannot be imported: OSError: no libcudart"},
            "?? nothing could be diagnosed, since torch cannot be imported: OSError: no libcudart",
        ),
    ],
)
def test_a_watched_program_is_ok_only_where_it_ended_well(how: dict[str, Any], said: str) -> None:
    lines = watch_lines(WatchDiagnosis(command=["x"], wall_s=1.0, suffered=[], **how))
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(" ".join(lines[1:]).split()) == said
    assert style_of(lines[1]) == ("green" if said.startswith("ok") else "yellow")


def test_a_program_that_suffered_is_told_of_that_alone() -> None:
    suffered = Suffered(slug="late-shape", title="A shape.", evidence=["one"])
    found = WatchDiagnosis(command=["x"], exit_code=1, wall_s=1.0, suffered=[suffered])
    assert [line for line in watch_lines(found) if line.startswith(("ok", "??"))] == []
