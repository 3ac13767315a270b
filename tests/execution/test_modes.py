"""The mode is settled by what the machine has, and the choice explains itself."""

import shutil
from collections.abc import Sequence

import pytest

from dflash.errors import ConfigError
from dflash.execution import Mode, behaviour_of, choose_mode, is_known
from dflash.execution.versions import TABLE

THREE = ["cuda:1"] * 3
TWO = ["cuda:0", "cuda:1"]
OLD, NEW = "2.12.1+cu130", "2.13.0"


@pytest.mark.parametrize(
    ("requested", "devices", "mode", "why"),
    [
        ("auto", TWO, "graphed", "every drafter runs on a CUDA device"),
        ("auto", ["cpu"], "eager", "a drafter runs on the CPU"),
        ("eager", ["cuda:0"], "eager", "asked for by execution.mode"),
        ("compiled", ["cuda:0"], "compiled", "asked for by execution.mode"),
        ("graphed", TWO, "graphed", "asked for by execution.mode"),
        ("warmed", TWO, "warmed", "asked for by execution.mode"),
        ("reduce-overhead", ["cuda:0"], "reduce-overhead", "asked for by execution.mode"),
    ],
)
def test_a_choice_says_why(requested: Mode, devices: Sequence[str], *, mode: str, why: str) -> None:
    choice = choose_mode(requested, devices)
    assert choice.mode == mode
    assert why in choice.why
    assert bool(choice.fallbacks) == (requested == "auto" and "cpu" not in devices)


def test_only_auto_gives_way_and_it_says_to_what() -> None:
    choice = choose_mode("auto", TWO)
    assert choice.fallbacks == ("compiled", "eager")
    second = choice.fall_back("it cannot capture `x.item()`")
    assert (second.mode, second.fallbacks) == ("compiled", ("eager",))
    assert second.why == "graphed was tried first: it cannot capture `x.item()`"
    third = second.fall_back("no compiler")
    assert third.mode == "eager"
    assert "graphed was tried first" in third.why
    assert "compiled was tried next: no compiler" in third.why


def test_compiling_for_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/g++" if name == "g++" else None)
    assert choose_mode("compiled", ["cpu"]).mode == "compiled"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"neither g\+\+ nor clang\+\+ is on the PATH") as caught:
        choose_mode("compiled", ["cpu"])
    assert "execution.mode = 'eager'" in caught.value.hint
    assert choose_mode("compiled", ["cuda:0"]).mode == "compiled"


@pytest.mark.parametrize("mode", ["graphed", "warmed", "reduce-overhead"])
def test_nothing_is_captured_on_a_cpu(mode: Mode) -> None:
    with pytest.raises(ConfigError, match=f"'{mode}' captures CUDA graphs, but .* CPU") as caught:
        choose_mode(mode, ["cuda:0", "cpu"])
    assert caught.value.exit_code == 2


def test_several_lazy_workers_are_refused_where_they_die() -> None:
    with pytest.raises(ConfigError, match=r"2 drafters on torch 2\.12\.1.*AssertionError") as no:
        choose_mode("reduce-overhead", TWO, torch_version=OLD)
    assert "cudagraph-trees" in no.value.what
    assert "'graphed'" in no.value.hint
    assert "allow_unsafe" in no.value.hint
    for fine in (
        choose_mode("reduce-overhead", TWO, torch_version=OLD, allow_unsafe=True),
        choose_mode("reduce-overhead", TWO[:1], torch_version=OLD),
        choose_mode("reduce-overhead", TWO, torch_version=NEW),
    ):
        assert fine.mode == "reduce-overhead"


@pytest.mark.parametrize("mode", ["warmed", "reduce-overhead"])
def test_drafters_whose_trees_would_overwrite_each_other_are_refused(mode: Mode) -> None:
    for devices, told in (
        (["cuda:0"] * 2, "2 drafters on cuda:0"),
        (THREE, "3 drafters on cuda:1"),
    ):
        with pytest.raises(ConfigError, match=told):
            choose_mode(mode, devices, torch_version=NEW)
    with pytest.raises(ConfigError, match="accumulate_steps > 1"):
        choose_mode(mode, TWO, torch_version=NEW, accumulates=True)
    assert choose_mode(mode, TWO[:1], torch_version=NEW, accumulates=True).mode == mode
    assert choose_mode("graphed", ["cuda:0", "cuda:0"], accumulates=True).mode == "graphed"


def test_an_untried_torch_is_not_taken_for_safe() -> None:
    with pytest.raises(ConfigError, match=r"torch 9\.9\.0 does .* is not known"):
        choose_mode("reduce-overhead", TWO, torch_version="9.9.0")
    assert "not known" in choose_mode("graphed", TWO, torch_version="9.9.0").why
    assert "not known" not in choose_mode("graphed", TWO, torch_version=NEW).why
    assert not is_known("9.9.0")


@pytest.mark.parametrize(
    ("version", "captures_in", "two_die"),
    [
        ("2.9.1", "main", True),
        ("2.11.0+cu130", "main", True),
        ("2.12.1", "main", True),
        ("2.13.0a0+git1234", "worker", False),
        ("2.14.1", "worker", False),
        ("3.0.0", "worker", False),
        ("2.8.0", "main", True),
    ],
)
def test_every_version_has_its_thread_for_captures(
    version: str, captures_in: str, *, two_die: bool
) -> None:
    behaviour = behaviour_of(version)
    assert behaviour.captures_in == captures_in
    assert behaviour.lazy_workers_die(2) == two_die
    assert not behaviour.lazy_workers_die(1)


def test_every_minor_version_since_the_oldest_has_a_row() -> None:
    minors = [minor for _, minor in TABLE]
    assert minors == list(range(9, 15))
