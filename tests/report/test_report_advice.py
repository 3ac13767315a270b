"""What ``dflash diagnose all`` advises can be pasted, into a shell and into a configuration."""

import re
import subprocess
from pathlib import Path

import pytest

from dflash.config import examine
from dflash.diagnose.machine import Machine
from dflash.diagnose.matrix import advise
from dflash.environment import environment
from dflash.report.diagnosis import WIDTH, advice_lines

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
CPU, EIGHT = (0, 6, 2), (8, 6, 2)  # GPUs, targets, drafters
GPUS = [f"cuda:{number}" for number in range(8)]
ADVISED = {CPU: (["cpu"], ["cpu", "cpu"], "eager"), EIGHT: (GPUS[:6], GPUS[6:], "graphed")}


def advised(counts: tuple[int, int, int]) -> list[str]:
    num_gpus, num_targets, num_drafters = counts
    machine = Machine("2.13.0", num_gpus, 4, environment(with_torch=False))
    return advice_lines(advise([], machine, num_targets=num_targets, num_drafters=num_drafters))


def accepted(path: Path, *words: str) -> tuple[list[str], list[str], str]:
    """What ``dflash config check`` makes of the file: devices of both sides, and the mode."""
    loaded, problems = examine(path, words)
    assert loaded is not None, problems
    config = loaded.config
    return list(config.target.devices), list(config.drafter.devices), config.execution.mode


@pytest.mark.parametrize("counts", [CPU, EIGHT])
def test_the_advised_command_can_be_pasted_into_a_shell(counts: tuple[int, int, int]) -> None:
    lines = advised(counts)
    assert max(map(len, lines)) <= WIDTH
    start = next(at for at, line in enumerate(lines) if line.startswith("  dflash train CONFIG"))
    stop = next(at for at in range(start, len(lines)) if not lines[at].endswith("\\")) + 1
    script = "\n".join(["dflash() { printf '%s\\n' \"$@\"; }", *lines[start:stop]])
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)  # noqa: S607
    train, config, *words = shell.stdout.splitlines()
    assert (train, config) == ("train", "CONFIG")
    assert accepted(QUICKSTART, *words) == ADVISED[counts]


@pytest.mark.parametrize("counts", [CPU, EIGHT])
def test_the_advised_keys_can_be_set_in_a_configuration(
    counts: tuple[int, int, int], tmp_path: Path
) -> None:
    lines = advised(counts)
    start = lines.index("or set these keys in CONFIG, each in the section of that name:") + 1
    text, section = QUICKSTART.read_text(encoding="utf-8"), ""
    for line in lines[start : lines.index("", start)]:
        if line.startswith("  ["):
            section = line.strip()
            continue
        key = line.split()[0]
        before, head, rest = text.partition(f"\n{section}\n")
        rest, num_set = re.subn(rf"(?m)^{key} = .*$", line.strip(), rest, count=1)
        assert (head.strip(), num_set) == (section, 1)
        text = before + head + rest
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert accepted(tmp_path / "mine.toml") == ADVISED[counts]


def test_an_execution_modes_name_is_not_broken_in_two() -> None:
    assert "reduce-overhead" in " ".join(advised(EIGHT)[-3:])
    assert not any(line.endswith("-") for line in advised(EIGHT))
