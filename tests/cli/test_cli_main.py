"""The command line answers fast, in one place, with the exit codes it promises."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer

from dflash import __version__
from dflash.cli import commands
from dflash.cli.__main__ import main
from dflash.errors import DataError, DflashError, HangError, NonFiniteError

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command leaves behind, it leaves in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter from the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Make a function the command ``probe``."""

    def register(function: Callable[..., None]) -> None:
        module = ModuleType("probe_module")
        module.probe = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe_module", module)
        entry = commands.Command("probe_module", "probe", "probes")
        monkeypatch.setitem(commands.COMMANDS, "probe", entry)

    return register


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_help_lists_every_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, command in commands.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.help)}$", listed, re.MULTILINE)


def test_no_command_at_all_shows_the_help(capsys: Capture) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: dflash COMMAND")


def test_version_is_the_package_s(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dflash {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"]])
def test_the_help_imports_no_command_and_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from dflash.cli.__main__ import main; main(sys.argv[1:]);"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    ran = python("-c", code, *arguments)
    modules = {name.partition(".")[0] for name in ran.stderr.splitlines()}
    assert (
        modules & {"torch", "transformers", "numpy", "typer", "click", "rich", "pydantic"} == set()
    )


def test_the_help_of_config_imports_no_torch() -> None:
    code = (
        "import sys; from dflash.cli.__main__ import main;"
        "assert main(['config', '--help']) == 0; sys.exit('torch' in sys.modules)"
    )
    ran = python("-c", code)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_shows_its_own_help(name: str, capsys: Capture) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: dflash {name}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("trian", "train"), ("exprot", "export"), ("--verison", "--version"), ("conf", "config")],
)
def test_an_unknown_command_exits_2_with_the_nearest(
    typed: str, meant: str, capsys: Capture
) -> None:
    assert main([typed]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: there is no command {typed!r}\nhint: did you mean {meant}?\n"


@pytest.mark.parametrize("arguments", [["config", "check"], ["config", "show", "--jason", "x"]])
def test_a_usage_error_exits_2(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    assert "Usage: dflash config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("rows.jsonl:3 is no JSON", hint="repair it"), 12),
        (NonFiniteError("loss is nan at step 3", hint="repair it"), 10),
        (HangError("nothing moved", hint="repair it"), 5),
    ],
)
def test_an_error_is_a_sentence_a_hint_and_its_code(
    probe: Callable[..., None], capsys: Capture, *, error: DflashError, code: int
) -> None:
    probe(raising(error))
    assert main(["probe"]) == code
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"error: {error.what}\nhint: repair it\n")


def test_a_command_s_exit_code_is_passed_on(probe: Callable[..., None]) -> None:
    probe(raising(typer.Exit(75)))
    assert main(["probe"]) == 75


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(32, "pipe"), 141)]
)
def test_an_interrupt_and_a_closed_pipe_are_no_findings(error: BaseException, code: int) -> None:
    program = (
        "import sys, types; from dflash.cli import commands, __main__\n"
        "def probe():\n"
        f"    raise {error!r}\n"
        "module = types.ModuleType('probe_module'); module.probe = probe\n"
        "sys.modules['probe_module'] = module\n"
        "commands.COMMANDS['probe'] = commands.Command('probe_module', 'probe', '')\n"
        "sys.exit(__main__.main(['probe']))\n"
    )
    ran = python("-c", program)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr


def test_a_reader_that_leaves_is_not_complained_about() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "dflash.cli", "config", "schema"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("form", [["--run-dir", "run"], ["--run-dir=run"]])
def test_a_bug_leaves_a_crash_file_in_the_run_folder(
    probe: Callable[..., None], tmp_path: Path, capsys: Capture, *, form: list[str]
) -> None:
    (tmp_path / "run").mkdir()

    def crash(run_dir: str) -> None:
        raise KeyError(run_dir)

    def command(run_dir: str = "") -> None:
        crash(run_dir)

    probe(command)
    assert main(["probe", *form]) == 70
    (file,) = (tmp_path / "run").iterdir()
    text = file.read_text()
    assert text.startswith(f"command: dflash probe {' '.join(form)}\n")
    assert f"dflash {__version__}, python " in text
    assert "in crash\n    raise KeyError(run_dir)" in text
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"error: internal error, KeyError: 'run'; its traceback is in run/{file.name}"
    assert len(said) == 2


def test_a_bug_elsewhere_leaves_a_crash_file_here(
    probe: Callable[..., None], tmp_path: Path
) -> None:
    probe(raising(RuntimeError("boom")))
    assert main(["probe"]) == 70
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["dflash-crash-"]


def test_env_says_what_hides_gpus_from_cuda(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["env"]) == 0
    assert "CUDA_VISIBLE_DEVICES" not in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert main(["env"]) == 0
    assert "CUDA_VISIBLE_DEVICES=1: CUDA sees no other GPU" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cuda_visible_devices"] == "1"


def test_env_works_without_a_gpu_and_says_why(capsys: Capture) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dflash"] == __version__
    assert found["packages"]["torch"]
    assert bool(found["gpus"]) != bool(found["gpus_unknown_because"])
    assert main(["env"]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert re.search(rf"^dflash +{re.escape(__version__)}$", plain, re.MULTILINE)
