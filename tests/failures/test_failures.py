"""Every failure mode keeps its promises: the fault shows, the remedy helps, the page is whole."""

import importlib
from functools import cache
from pathlib import Path

import pytest
import torch

from dflash.diagnose.examine import Plan, examine
from dflash.diagnose.expected import expectation
from dflash.diagnose.findings import Finding, Launch
from dflash.diagnose.finished import FinishedRun, as_finished
from dflash.diagnose.machine import Machine, applies, look
from dflash.failures import FailureMode, all_modes, page_of
from dflash.failures._mode import HEADINGS

MODES = all_modes()
MAX_LINES = 120
NEEDED = {
    "capture-race", "cudagraph-trees", "cross-thread-replay", "allocator-churn", "late-shape",
    "missing-step-mark", "fx-trace-race", "first-compile-crash", "compile-deadlock",
    "worker-config-lost", "compiling-leak", "skipped-graphs", "rng-in-capture", "wrong-device",
    "future-leak", "label-shift", "document-leak", "frozen-bf16", "marginal-acceptance",
    "cached-static-input",
}  # fmt: skip

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.slug)
here = [mode for mode in MODES if mode.device == "cpu" and not mode.child]
in_children = [mode for mode in MODES if mode not in here]
directly = pytest.mark.parametrize("mode", here, ids=lambda mode: mode.slug)
launched = pytest.mark.parametrize("mode", in_children, ids=lambda mode: mode.slug)


@cache
def machine() -> Machine:
    return look()


@cache
def found(slug: str) -> Finding:
    """The finding of this machine; a few launches, since these are tests and no diagnosis."""
    mode = next(mode for mode in MODES if mode.slug == slug)
    fit = applies(mode, machine())
    if fit.part is None:
        pytest.skip(fit.not_run)
    plan = Plan(level="quick", trials=3 if mode.chance else 1)
    (finding,) = examine([mode], machine(), plan=plan)
    return finding


def evidence_of(finding: Finding, variant: str) -> list[Launch]:
    return [launch for launch in finding.launches if launch.variant == variant]


def test_no_failure_mode_is_missing() -> None:
    assert {mode.slug for mode in MODES} == NEEDED


@every_mode
def test_a_page_has_every_heading_in_order_and_something_below_each(mode: FailureMode) -> None:
    page = page_of(mode)
    assert tuple(page.sections) == HEADINGS
    assert all(page.sections.values())
    assert page.title.endswith(".")
    assert "\n" not in page.title


@every_mode
def test_a_page_is_one_file_of_its_name_that_is_read_in_one_sitting(mode: FailureMode) -> None:
    module = importlib.import_module(f"dflash.failures.{mode.slug.replace('-', '_')}")
    assert module.MODE is mode
    assert module.__file__ is not None
    lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= MAX_LINES


@every_mode
def test_a_remedy_is_production_code_and_its_page_names_it(mode: FailureMode) -> None:
    remedy = mode.remedy
    assert remedy.__module__.startswith("dflash.")
    assert not remedy.__module__.startswith(("dflash.failures", "dflash.diagnose"))
    module = importlib.import_module(remedy.__module__)
    thing: object = module
    for name in remedy.__qualname__.split("."):
        thing = getattr(thing, name)
    assert thing is remedy or getattr(thing, "__func__", None) is remedy
    assert remedy.__qualname__.split(".")[0] in page_of(mode).sections["Remedy"]


@every_mode
def test_a_mode_says_what_it_measures_and_which_ends_are_it(mode: FailureMode) -> None:
    assert mode.measures
    assert mode.unit
    assert bool(mode.deaths) <= mode.child  # what dies must not die here
    assert mode.device == "cpu" or mode.child


@directly
def test_the_fault_exceeds_its_limit_and_production_does_not(mode: FailureMode) -> None:
    assert mode.reproduce(faulty=True) > mode.limit
    assert mode.reproduce(faulty=False) <= mode.limit


@directly
def test_the_same_seed_gives_the_same_number(mode: FailureMode) -> None:
    for faulty in (True, False):
        first, again = (mode.reproduce(faulty=faulty, seed=3) for _ in range(2))
        assert first == again


@pytest.mark.slow
@launched
def test_what_happens_in_children_is_what_was_expected_of_this_torch(mode: FailureMode) -> None:
    finding = found(mode.slug)
    expected = expectation(mode, torch.__version__, num_gpus=machine().num_gpus)
    if expected.expected == "not known":
        pytest.skip(expected.why)
    told = [(one.variant, one.end, one.value, one.message) for one in finding.launches]
    assert finding.verdict == expected.expected, told
    assert finding.remedy_verified != "no", finding.remedy_why


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if mode.detect], ids=lambda mode: mode.slug
)
def test_a_detector_fires_on_the_faulty_run_alone(mode: FailureMode) -> None:
    assert mode.detect is not None
    assert list(mode.detect(FinishedRun())) == []
    finding = found(mode.slug)
    assert list(mode.detect(as_finished(evidence_of(finding, "sound")))) == []
    faulty = evidence_of(finding, "faulty")
    if finding.verdict == "reproduced" and any(one.end != "number" for one in faulty):
        assert list(mode.detect(as_finished(faulty))) != []
