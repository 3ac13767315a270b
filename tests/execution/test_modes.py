"""The mode is settled by what the machine has, and the choice explains itself."""

import shutil
from collections.abc import Sequence
from typing import Literal

import pytest

from dflash.errors import ConfigError
from dflash.execution import choose_mode


@pytest.mark.parametrize(
    ("requested", "devices", "mode", "why"),
    [
        ("auto", ["cuda:0", "cuda:1"], "compiled", "every drafter runs on a CUDA device"),
        ("auto", ["cpu"], "eager", "a drafter runs on the CPU"),
        ("eager", ["cuda:0"], "eager", "asked for by execution.mode"),
        ("compiled", ["cuda:0"], "compiled", "asked for by execution.mode"),
    ],
)
def test_a_choice_says_why(
    requested: Literal["auto", "eager", "compiled"], devices: Sequence[str], *, mode: str, why: str
) -> None:
    choice = choose_mode(requested, devices)
    assert choice.mode == mode
    assert why in choice.why


def test_compiling_for_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/g++" if name == "g++" else None)
    assert choose_mode("compiled", ["cpu"]).mode == "compiled"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"neither g\+\+ nor clang\+\+ is on the PATH") as caught:
        choose_mode("compiled", ["cpu"])
    assert "execution.mode = 'eager'" in caught.value.hint
    assert choose_mode("compiled", ["cuda:0"]).mode == "compiled"
