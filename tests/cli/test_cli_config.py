"""``dflash config`` writes, checks and shows configurations, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.cli.__main__ import main
from dflash.config import load, starter_config

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    assert main(["config", "init", str(path)]) == 0
    return path


def test_init_prints_a_configuration_that_loads(capsys: Capture, tmp_path: Path) -> None:
    assert main(["config", "init"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert load(path).config == starter_config()


def test_init_writes_the_same_file(path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    main(["config", "init"])
    assert path.read_text() == capsys.readouterr().out
    assert list(path.parent.iterdir()) == [path]


def test_init_overwrites_only_when_forced(path: Path, capsys: Capture) -> None:
    path.write_text("mine")
    assert main(["config", "init", str(path)]) == 2
    assert path.read_text() == "mine"
    assert capsys.readouterr().err.endswith("exists already\nhint: --force overwrites it\n")
    assert main(["config", "init", str(path), "--force"]) == 0
    assert load(path).config == starter_config()


def test_init_names_a_place_it_cannot_write_to(tmp_path: Path, capsys: Capture) -> None:
    assert main(["config", "init", str(tmp_path / "none" / "run.toml")]) == 2
    assert "run.toml cannot be written: No such file" in capsys.readouterr().err


def test_check_accepts_a_valid_file(path: Path, capsys: Capture) -> None:
    assert main(["config", "check", str(path), "optim.lr=1e-3"]) == 0
    assert capsys.readouterr().out == f"{path} is a valid configuration\n"


def test_check_lists_every_problem_and_exits_2(path: Path, capsys: Capture) -> None:
    assert main(["config", "check", str(path), "optim.lr=-1", "optim.max_steps=3", "sed=1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"error: {path} has 3 problems:",
        "  - sed=1: unknown key; did you mean seed?",
        "  - optim.lr: expected a number, above 0, got -1",
        (
            "  - optim.max_steps: set exactly one of optim.max_steps and optim.epochs, not both (3"
            " and 6): take the other out of the file, since no override can unset it, or end a run"
            " of epochs early with `dflash train --max-steps 3`"
        ),
    ]


def test_check_prints_its_problems_as_json(path: Path, capsys: Capture) -> None:
    assert main(["config", "check", str(path), "optim.lr=-1", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert [problem["key"] for problem in found["problems"]] == ["optim.lr"]


def test_check_notes_files_that_are_not_here(path: Path, capsys: Capture) -> None:
    arguments = ["target.model=models/none", "data.train=['rows.jsonl']", "drafter.init_from=old"]
    assert main(["config", "check", str(path), *arguments]) == 0
    assert capsys.readouterr().err.splitlines()[-3:] == [
        'note: target.model = "models/none": there is no such file or folder here',
        'note: data.train[0] = "rows.jsonl": there is no such file or folder here',
        'note: drafter.init_from = "old": there is no such file or folder here',
    ]


def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_check_refuses_at_once_all_that_train_would_refuse_here(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_only(monkeypatch)
    asked = ["execution.mode=graphed", "precision.matmul=fp8", "execution.gradient_sum=nccl"]
    asked += ["drafter.devices=['cpu','cpu']", "optim.lr=-1", "drafter.intermediate_size=20"]
    capsys.readouterr()
    assert main(["config", "check", str(path), *asked]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path} has 5 problems:\n  - optim.lr: expected")
    assert "  - execution.mode = 'graphed' captures CUDA graphs, but a drafter" in said
    assert "  - precision.matmul in 8 bits needs a GPU of compute capability 8.9" in said
    assert "  - precision.matmul in 8 bits needs widths in multiples of 16: drafter.inter" in said
    assert "  - execution.gradient_sum = \"nccl\" with drafter.devices = ['cpu', 'cpu']" in said
    monkeypatch.chdir(path.parent)
    assert main(["train", str(path), *asked[:4]]) == 2
    refused = capsys.readouterr().err
    for each in ("captures CUDA graphs", "compute capability 8.9", '"nccl" with'):
        assert each in refused, "train says the same"


@pytest.mark.parametrize("asked", ["execution.mode=warmed", "precision.matmul=fp8-head"])
def test_check_judges_auto_by_the_devices_of_this_machine(  # noqa: PLR0917
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    cpu_only(monkeypatch)
    capsys.readouterr()
    assert main(["config", "check", str(path), asked, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [problem["key"] for problem in found["problems"]] == [asked.partition("=")[0]]


def test_check_notes_a_gpu_that_only_another_machine_has(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_only(monkeypatch)
    capsys.readouterr()
    named = ["target.devices=['cuda:0']", "drafter.devices=['cuda:1']", "precision.matmul=fp8"]
    assert main(["config", "check", str(path), *named, "execution.mode=graphed"]) == 0
    assert capsys.readouterr().err == (
        "note: target.devices: there is no device cuda:0; drafter.devices: there is no device"
        " cuda:1; this process sees no CUDA devices; dflash train refuses that here\n"
    )
    assert main(["config", "check", str(path), *named, "drafter.head_dim=8"]) == 2
    assert "drafter.head_dim = 8: attention on a CUDA device" in capsys.readouterr().err


def test_check_does_not_judge_devices_that_are_none(path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    asked = ["drafter.devices=['gpu']", "execution.mode=graphed"]
    assert main(["config", "check", str(path), *asked]) == 2
    assert "has 1 problem:" in capsys.readouterr().err


def test_check_notes_a_package_that_is_not_installed(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    capsys.readouterr()
    assert main(["config", "check", str(path), "log.sinks=['jsonl','tensorboard']"]) == 0
    assert "the package tensorboard is not installed" in capsys.readouterr().err


def test_check_needs_no_torch(path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dflash.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "config", "check", str(path)],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_show_lists_value_unit_and_origin(path: Path, capsys: Capture) -> None:
    path.write_text('[target]\nmodel = "m"\n[data]\ntrain = ["t"]\n[optim]\nepochs = 2\n')
    capsys.readouterr()
    assert main(["config", "show", str(path), "seed=3"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["key"] == ["value", "unit", "origin"]
    assert rows["seed"] == ["3", "override"]
    assert rows["optim.epochs"] == ["2", "epochs", "file"]
    assert rows["optim.max_steps"] == ["absent", "steps", "default"]
    assert rows["data.token_budget"] == ["8192", "tokens", "default"]


def test_show_prints_json(path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert main(["config", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["drafter.block_size"]["value"] == 16
    assert shown["drafter.block_size"]["unit"] == "slots"
    assert shown["target.model"] == {
        "value": "stdlib-lm",
        "unit": "",
        "origin": "file",
        "description": 'folder with safetensors, .gguf file, or "stdlib-lm" (ships with dflash)',
        "expects": "a text, not empty",
    }


def test_schema_is_a_json_schema_that_forbids_other_keys(capsys: Capture) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"target", "data"}
