"""On a GPU: what a run really takes against its plan, and what running out of memory says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_runs import tiny_config, write_target

from dflash.config import to_toml

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target wide enough for a step to be made of the large tensors that a plan counts."""
    folder = write_target(tmp_path_factory.mktemp("wide") / "target")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def dflash(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, whose peak is its own too; *before* runs first."""
    program = f"{before}\nimport sys\nfrom dflash.cli.__main__ import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def write_config(path: Path, place: Path, target: Path, **changes: Any) -> str:  # noqa: ANN401
    sections: dict[str, dict[str, Any]] = {
        "target": {"model": str(target), "devices": ("cuda:0",)},
        "drafter": {"devices": ("cuda:0",), "num_layers": 4, "block_size": 16},
        "data": {"token_budget": 8192, "anchor_density": 1 / 6, "max_document_tokens": 1024},
    }
    for section, keys in changes.items():
        sections.setdefault(section, {}).update(keys)
    path.write_text(to_toml(tiny_config(place, **sections)))
    return str(path)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["eager", "compiled", "graphed"])
def test_the_plan_is_what_a_step_takes(  # noqa: PLR0917
    place: Path,
    tmp_path: Path,
    wide_target: Path,
    mode: str,
    checkpointing: bool,
    accumulate_steps: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Never much more than planned, so that what is called fitting does fit; and not so much less
    that a run which would fit is refused."""
    execution = {"mode": mode, "activation_checkpointing": checkpointing}
    optim = {"accumulate_steps": accumulate_steps}
    config = write_config(
        tmp_path / "run.toml", place, wide_target, execution=execution, optim=optim
    )
    done = dflash("train", config, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    predicted = sum(plan["items"].values())
    gib = {name: f"{size / 2**30:.3f}" for name, size in plan["items"].items()}
    record_property("GiB", gib)
    assert plan["measured_bytes"] <= 1.10 * predicted, gib
    assert plan["reserved_bytes"] >= 0.75 * predicted, gib


def test_graphs_of_several_drafters_on_a_gpu_are_planned_and_counted_each(
    place: Path, tmp_path: Path, wide_target: Path
) -> None:
    """The allocator's own peak has only one of the pools that the graphs live in."""
    measured = {}
    for number in (1, 2):
        config = write_config(
            tmp_path / f"{number}.toml",
            place,
            wide_target,
            execution={"mode": "graphed"},
            drafter={"devices": ("cuda:0",) * number},
        )
        done = dflash("train", config, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        (plan,) = json.loads(done.stdout)["plans"]
        predicted = sum(plan["items"].values())
        measured[number] = plan["measured_bytes"]
        assert 0.75 * predicted <= measured[number] <= 1.10 * predicted, plan["items"]
        assert measured[number] <= plan["reserved_bytes"]
    shared = 2**29  # the target is there once
    assert measured[2] >= 2 * measured[1] - shared


def test_what_cannot_fit_is_refused_before_anything_is_loaded(
    place: Path, tmp_path: Path, wide_target: Path
) -> None:
    huge = {"token_budget": 2**21, "max_document_tokens": 4096}
    config = write_config(tmp_path / "huge.toml", place, wide_target, data=huge)
    done = dflash("train", config, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 11, done.stderr
    assert "error: the run cannot fit: cuda:0 needs" in done.stderr
    assert "data.token_budget = " in done.stderr
    assert "Traceback" not in done.stderr


def test_running_out_all_the_same_ends_with_numbers(
    place: Path, tmp_path: Path, wide_target: Path
) -> None:
    config = write_config(tmp_path / "run.toml", place, wide_target)
    little = "import torch; torch.cuda.set_per_process_memory_fraction(0.01)"
    done = dflash("train", config, "--run-dir", str(tmp_path / "run"), before=little)
    assert done.returncode == 11, done.stderr
    assert "ran out of device memory" in done.stderr
    assert "execution.activation_checkpointing = true -> " in done.stderr
    assert "GiB" in done.stderr
    assert "Traceback" not in done.stderr
