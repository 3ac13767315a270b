"""On a GPU: what the pages promise there beyond their one number."""

import pytest
import torch

from dflash.diagnose.examine import Plan, examine
from dflash.diagnose.findings import Finding, Mark
from dflash.diagnose.machine import look
from dflash.diagnose.select import mode_called

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def found(slug: str) -> Finding:
    (finding,) = examine([mode_called(slug)], look(), plan=Plan(level="quick"))
    return finding


def marks(finding: Finding, variant: str, kind: str) -> list[Mark]:
    return [
        mark
        for launch in finding.launches
        if launch.variant == variant
        for mark in launch.marks
        if mark.kind == kind
    ]


def test_variable_lengths_reserve_three_times_what_is_used_and_a_fixed_one_does_not() -> None:
    finding = found("allocator-churn")
    assert finding.worst is not None
    assert finding.best is not None
    assert finding.worst >= 3.0
    assert finding.best <= 1.2
    fixed, variable = (marks(finding, variant, "note")[-1] for variant in ("sound", "faulty"))
    assert fixed.detail["late_device_allocations"] == 0
    assert variable.detail["late_device_allocations"] > 0
    assert {mark.detail["step"] for mark in marks(finding, "sound", "memory")} == set(range(60))


@pytest.mark.parametrize(
    "slug", ["capture-race", "late-shape", "missing-step-mark", "compile-deadlock"]
)
def test_what_was_seen_on_an_h200_is_seen_again_and_its_remedy_holds(slug: str) -> None:
    if slug == "compile-deadlock" and not torch.__version__.startswith("2.11."):
        pytest.skip("known of torch 2.11 alone")
    finding = found(slug)
    told = [(one.variant, one.end, one.value, one.message) for one in finding.launches]
    assert finding.verdict == "reproduced", told
    assert finding.remedy_verified in ("yes", "unclear"), told  # two launches may be luck
