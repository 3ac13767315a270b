"""The advice follows the rules of training and what was found here."""

import dataclasses
import tomllib
from typing import Any

import fake_modes
import pytest

from dflash.diagnose.examine import Plan, examine
from dflash.diagnose.findings import Finding, Verdict
from dflash.diagnose.machine import Machine, applies
from dflash.diagnose.matrix import advise, layout
from dflash.environment import environment

OLD, NEW = "2.11.0+cu130", "2.13.0"


def machine(num_gpus: int, torch: str = NEW) -> Machine:
    return Machine(torch, num_gpus, 4, environment(with_torch=False))


def finding(verdict: Verdict, **more: Any) -> Finding:  # noqa: ANN401 - its other fields
    return Finding(
        slug="cudagraph-trees",
        title="",
        device="gpu",
        verdict=verdict,
        why="",
        expected="not known",
        expected_why="",
        **more,
    )


def safety(torch: str, *found: Finding, num_drafters: int = 2) -> dict[str, str]:
    advice = advise(found, machine(4, torch), num_targets=2, num_drafters=num_drafters)
    return {each.mode: each.safe for each in advice.modes}


def test_what_training_refuses_is_not_called_safe() -> None:
    assert safety(OLD)["reduce-overhead"] == "no"
    assert safety(OLD, num_drafters=1)["reduce-overhead"] == "yes"
    assert safety(NEW)["reduce-overhead"] == "yes"
    assert safety(OLD)["graphed"] == "yes"


def test_what_is_refused_and_was_reproduced_is_said_to_have_been() -> None:
    advice = advise([finding("reproduced")], machine(4, OLD), num_targets=1, num_drafters=2)
    (lazy,) = [each for each in advice.modes if each.mode == "reduce-overhead"]
    assert lazy.why.endswith("; reproduced here")
    quiet = advise([finding("inconclusive")], machine(4, OLD), num_targets=1, num_drafters=2)
    assert not any("reproduced here" in each.why for each in quiet.modes)


def test_where_a_remedy_failed_no_capture_is_known_to_be_safe() -> None:
    found = safety(NEW, finding("reproduced", remedy_verified="no"))
    assert found["graphed"] == found["warmed"] == "not known"
    assert found["compiled"] == "yes"


def test_captures_of_an_untried_torch_are_not_known() -> None:
    found = safety("9.9.0", num_drafters=1)
    assert found["graphed"] == found["warmed"] == found["reduce-overhead"] == "not known"
    assert (found["eager"], found["compiled"]) == ("yes", "yes")


def test_the_best_safe_mode_is_chosen() -> None:
    def choice(*found: Finding, torch: str = NEW) -> str:
        return advise(found, machine(2, torch), num_targets=1, num_drafters=1).choose

    assert choice() == "graphed"
    assert choice(torch="9.9.0") == "compiled"
    assert choice(finding("reproduced", remedy_verified="no")) == "compiled"


def test_a_cpu_cannot_run_what_captures() -> None:
    advice = advise([], machine(0), num_targets=1, num_drafters=1)
    assert {each.mode for each in advice.modes if each.safe == "cannot run"} == {
        "reduce-overhead",
        "warmed",
        "graphed",
    }
    assert advice.choose == "eager"
    assert advice.sentence.endswith("safe here: eager, compiled; choose eager")


def test_targets_come_first_and_gpus_are_used_again_where_they_end() -> None:
    assert layout(8, 6, 2) == ([f"cuda:{i}" for i in range(6)], ["cuda:6", "cuda:7"])
    assert layout(1, 1, 1) == (["cuda:0"], ["cuda:0"])
    assert layout(2, 2, 1) == (["cuda:0", "cuda:1"], ["cuda:0"])
    assert layout(0, 1, 2) == (["cpu"], ["cpu", "cpu"])


def test_one_sentence_says_that_devices_are_fewer_than_targets_and_drafters() -> None:
    def why(num_gpus: int, num_targets: int, num_drafters: int) -> str:
        asked = {"num_targets": num_targets, "num_drafters": num_drafters}
        return advise([], machine(num_gpus), **asked).why

    once = "since a device holds the frozen target once"
    assert why(0, 6, 2).endswith(
        "; here is only the CPU for 6 targets and 2 drafters, which share it;"
        f" target.devices names 1 device, {once}"
    )
    assert why(0, 1, 1).endswith(
        "; here is only the CPU for 1 target and 1 drafter, which share it"
    )
    assert why(1, 1, 2).endswith("; here is 1 CUDA GPU for 1 target and 2 drafters, which share it")
    assert why(2, 2, 1).endswith(
        "; here are 2 CUDA GPUs for 2 targets and 1 drafter, which share them"
    )
    assert why(4, 5, 1).endswith(f"target.devices names 4 devices, {once}")
    assert "here" not in why(8, 6, 2)


def test_the_keys_to_set_are_a_configurations() -> None:
    advice = advise([], machine(4), num_targets=3, num_drafters=1)
    tables = tomllib.loads(advice.config)
    assert tables["target"]["devices"] == ["cuda:0", "cuda:1", "cuda:2"]
    assert tables["drafter"]["devices"] == ["cuda:3"]
    assert tables["execution"]["mode"] == "graphed"


def test_a_device_holds_the_target_once_in_the_keys_to_set() -> None:
    tables = tomllib.loads(advise([], machine(0), num_targets=6, num_drafters=2).config)
    assert tables["target"]["devices"] == ["cpu"]
    assert tables["drafter"]["devices"] == ["cpu", "cpu"]


def test_a_machine_without_gpus_runs_the_part_for_the_cpu_and_says_what_it_leaves_out() -> None:
    mode = dataclasses.replace(fake_modes.QUIET, device="gpu")
    assert applies(mode, machine(0)).part is None
    assert "needs a CUDA GPU" in applies(mode, machine(0)).not_run
    part = dataclasses.replace(mode, part_on_cpu=mode.reproduce)
    assert applies(part, machine(0)).part == "cpu"
    assert "the rest needs a CUDA GPU" in applies(part, machine(0)).not_run
    assert applies(part, machine(1)).part == "whole"
    two = dataclasses.replace(mode, device="two gpus")
    assert "needs 2 CUDA GPUs, here is 1" in applies(two, machine(1)).not_run


def test_what_cannot_run_here_is_not_applicable_and_launches_nothing() -> None:
    mode = dataclasses.replace(fake_modes.SEGV, device="gpu")
    (found,) = examine(
        [mode], machine(0), plan=Plan(), watch=lambda slug, _: pytest.fail(f"{slug} was launched")
    )
    assert (found.verdict, found.severity) == ("not applicable", "none")
    assert (found.remedy_verified, found.launches) == ("not run", [])


def test_levels_are_launches() -> None:
    cpu, gpu = fake_modes.QUIET, dataclasses.replace(fake_modes.QUIET, device="gpu")
    levels = ("quick", "standard", "deep")
    assert [Plan(level=level).launches(cpu, "whole") for level in levels] == [5, 20, 300]
    assert [Plan(level=level).launches(gpu, "whole") for level in levels] == [2, 5, 20]
    assert [Plan(level=level).launches(gpu, "cpu") for level in levels] == [5, 20, 300]
    assert Plan(level="deep").launches(fake_modes.NUMBER, "whole") == 1
    assert Plan(trials=3).launches(fake_modes.NUMBER, "whole") == 3


def test_a_whole_examination_ends_in_a_finding() -> None:
    (found,) = examine([fake_modes.THREAD], machine(0), plan=Plan(level="quick"))
    assert (found.verdict, found.remedy_verified) == ("reproduced", "yes")
    assert found.faulty is not None
    assert (found.faulty.shown, found.faulty.launches) == (5, 5)
    assert found.severity == "error"
    assert found.remedy == "fake_modes.remedy"
    kept = [bool(launch.traceback) for launch in found.launches if launch.variant == "faulty"]
    assert kept == [True, True, False, False, False]
