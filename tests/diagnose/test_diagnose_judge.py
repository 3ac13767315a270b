"""Launches become verdicts by stated rules, and rates have exact bounds."""

import dataclasses
from math import comb

import fake_modes
import pytest

from dflash.diagnose.bounds import chance_that_alike, rate
from dflash.diagnose.expected import Expectation, expectation, minor_version
from dflash.diagnose.findings import Launch, Variant
from dflash.diagnose.judge import judge, severity

CHANCE, ONCE = fake_modes.SEGV, fake_modes.NUMBER


def numbers(variant: Variant, *values: float) -> list[Launch]:
    return [Launch(variant=variant, seed=i, end="number", value=v) for i, v in enumerate(values)]


def test_none_of_twenty_is_at_most_fourteen_percent() -> None:
    assert rate(0, 20).at_most == pytest.approx(0.1391, abs=5e-5)
    assert rate(0, 20).at_most == pytest.approx(1 - 0.05 ** (1 / 20))
    assert rate(20, 20).at_least == pytest.approx(0.05 ** (1 / 20))
    assert (rate(0, 5).at_least, rate(5, 5).at_most) == (0.0, 1.0)


@pytest.mark.parametrize(("shown", "launches"), [(1, 5), (7, 20), (3, 300), (299, 300)])
def test_bounds_are_where_the_tails_hold_five_percent(shown: int, launches: int) -> None:
    found = rate(shown, launches)

    def at_most(k: int, p: float) -> float:
        return sum(comb(launches, i) * p**i * (1 - p) ** (launches - i) for i in range(k + 1))

    assert at_most(shown, found.at_most) == pytest.approx(0.05)
    assert 1 - at_most(shown - 1, found.at_least) == pytest.approx(0.05)


def test_bounds_of_thousands_of_launches_are_those_of_the_normal_law() -> None:
    found = rate(400, 2000)  # the exact sum overflows from about a thousand on
    spread = 1.645 * (0.2 * 0.8 / 2000) ** 0.5
    assert found.at_least == pytest.approx(0.2 - spread, abs=5e-4)
    assert found.at_most == pytest.approx(0.2 + spread, abs=6e-4)
    assert rate(0, 30_000).at_most == pytest.approx(1 - 0.05 ** (1 / 30_000))
    assert rate(30_000, 30_000).at_least == pytest.approx(0.05 ** (1 / 30_000))


def test_a_remedy_by_luck_is_told_from_one_that_helps() -> None:
    assert chance_that_alike(rate(5, 5), rate(0, 5)) == pytest.approx(1 / 252)
    assert chance_that_alike(rate(2, 5), rate(0, 5)) == pytest.approx(comb(8, 3) / comb(10, 5))
    assert chance_that_alike(rate(1, 300), rate(0, 300)) == pytest.approx(0.5)


def test_a_number_above_the_limit_is_the_failure() -> None:
    found = judge(ONCE, [*numbers("faulty", 0.5), *numbers("sound", 0.0)])
    assert (found.verdict, found.remedy_verified) == ("reproduced", "yes")
    assert found.faulty == rate(1, 1)


def test_one_of_the_modes_deaths_is_the_failure() -> None:
    crash = Launch(variant="faulty", seed=0, end="signal", message="SIGSEGV")
    found = judge(CHANCE, [crash, *numbers("faulty", 0.0), *numbers("sound", 0.0, 0.0)])
    assert found.verdict == "reproduced"
    assert found.faulty == rate(1, 2)
    assert found.remedy_verified == "unclear"  # 0 of 2 against 1 of 2


def test_silence_is_told_with_its_bound() -> None:
    found = judge(CHANCE, [*numbers("faulty", *[0.0] * 20), *numbers("sound", 0.0)])
    assert found.verdict == "not reproduced"
    assert found.why == "0 of 20, so at most 13.9%"
    assert found.remedy_verified == "not run"


def test_a_foreign_end_is_no_verdict() -> None:
    foreign = Launch(variant="faulty", seed=1, end="exception", message="OSError: disk full")
    found = judge(CHANCE, [*numbers("faulty", 0.0), foreign])
    assert found.verdict == "inconclusive"
    assert "exception: OSError: disk full" in found.why
    nan = judge(ONCE, numbers("faulty", float("nan")))
    assert (nan.verdict, nan.why) == (
        "inconclusive",
        "a launch ended otherwise: its number is nan",
    )


def test_a_launch_cut_short_counts_neither_for_the_failure_nor_against_the_remedy() -> None:
    cut = [Launch(variant=v, seed=0, end="killed", message="no end") for v in ("faulty", "sound")]
    found = judge(fake_modes.HANG, cut)
    assert (found.verdict, found.remedy_verified) == ("inconclusive", "not run")
    assert severity(found, Expectation("reproduced", "")) == "warning"


def test_without_its_positive_control_silence_says_nothing() -> None:
    quiet = numbers("faulty", 0.0)
    dead = judge(CHANCE, [*quiet, *numbers("control", 0.0)])
    assert (dead.verdict, dead.why) == ("inconclusive", "the positive control did not fire")
    assert judge(CHANCE, [*quiet, *numbers("control", 9.0)]).verdict == "not reproduced"


def test_a_remedied_program_that_fails_is_an_error_even_where_the_faulty_one_does_not() -> None:
    found = judge(ONCE, [*numbers("faulty", 0.0), *numbers("sound", 2.0)])
    assert found.remedy_verified == "no"
    assert severity(found, Expectation("not reproduced", "")) == "error"


def test_what_is_not_as_known_is_a_warning() -> None:
    quiet = judge(ONCE, [*numbers("faulty", 0.0), *numbers("sound", 0.0)])
    assert severity(quiet, Expectation("not reproduced", "")) == "none"
    assert severity(quiet, Expectation("reproduced", "")) == "warning"
    assert severity(quiet, Expectation("not known", "")) == "warning"


TABLE = dataclasses.replace(ONCE, affected={"2.11": True, "2.13": False})


def test_what_holds_where_torch_sees_a_gpu_goes_before_what_holds_of_the_version() -> None:
    table = dataclasses.replace(ONCE, affected={"2.11": True, "2.11 with a GPU": False})
    assert expectation(table, "2.11.0").expected == "reproduced"
    on_gpu = expectation(table, "2.11.0+cu130", num_gpus=1)
    assert on_gpu == ("not reproduced", "torch 2.11 with a GPU does not have this failure")
    assert expectation(table, "2.12.0", num_gpus=1).why == (
        "nobody tried torch 2.12; the page knows of 2.11"
    )
    assert expectation(TABLE, "2.11.0", num_gpus=1).expected == "reproduced"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0+cu130", "reproduced"),
        ("2.13.1", "not reproduced"),
        ("2.13.0a0+git1234", "not known"),
        ("2.12.0", "not known"),
        ("2.15.0", "not known"),
        ("3.0.0", "not known"),
        ("2.1.0", "not known"),
    ],
)
def test_only_versions_of_the_table_are_known(version: str, expected: str) -> None:
    assert expectation(TABLE, version).expected == expected


def test_a_failure_of_the_program_is_expected_of_every_torch() -> None:
    assert expectation(ONCE, "9.9.9").expected == "reproduced"


def test_a_minor_version_is_read_off_a_release() -> None:
    assert minor_version("2.11.0+cu130") == "2.11"
    assert minor_version("2.14.0.dev20261101+cpu") is None
    assert minor_version("2.14.0rc1") is None
