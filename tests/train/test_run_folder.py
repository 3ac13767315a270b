"""What a run leaves in its folder, what it refuses, and what it shows on the way."""

import errno
import json
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import events_of, run, steps_of, tiny_config, write_target, write_texts

from dflash.config import load, to_toml
from dflash.errors import ConfigError, DataError, DeviceMemoryError, UsageError
from dflash.records import EvalRecord, EventRecord, RecordWriter, StepRecord, read_records
from dflash.train.boundary import Judge
from dflash.train.build import build
from dflash.train.checkpoint import INCOMPLETE, Keeper
from dflash.train.folder import STACKS
from dflash.train.rehearsal import rehearse


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with held-out text and a run of 12 steps that measured itself."""
    place = tmp_path_factory.mktemp("evaluated")
    write_target(place / "target")
    write_texts(place / "texts")
    (place / "heldout.txt").write_text("line 1 of file 99: 7\nline 2 of file 99: 14\n")
    config = tiny_config(
        place,
        data={"heldout": (str(place / "heldout.txt"),)},
        optim={"max_steps": 12},
        eval={"every_steps": 6, "num_prompts": 1},
    )
    outcome = run(config, place / "run")
    assert outcome.tau_before is not None
    assert outcome.tau is not None
    return place


def test_the_configuration_loads_back_equal(evaluated: Path) -> None:
    written = load(evaluated / "run" / "config.toml").config
    assert to_toml(written) == (evaluated / "run" / "config.toml").read_text()
    assert written.data.heldout == (str(evaluated / "heldout.txt"),)
    newest = evaluated / "run" / "checkpoints" / "step-00000012"
    assert load(newest / "config.toml").config == written, "it lies beside every checkpoint too"


def test_the_docs_name_everything_that_a_run_folder_holds(evaluated: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    table = docs.partition("## The run folder")[2].partition("\n\nA checkpoint is")[0]
    found = [
        f"{path.name}/" if path.is_dir() else path.name for path in (evaluated / "run").iterdir()
    ]
    assert {".lock", "data/", "records.jsonl"} < set(found)
    for name in (*found, "tensorboard/", STACKS, INCOMPLETE, "dflash-crash-"):
        assert re.search(rf"^\| `.*{re.escape(name)}", table, re.MULTILINE), name


def test_what_is_named_is_taken_at_its_word_on_a_cpu_too(place: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": {"compute": "bf16"}, "target": {"dtype": "bf16"}}
    run(tiny_config(place, optim={"max_steps": 2}, **changes), tmp_path)
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts["run"]["compute_dtype"] == "torch.bfloat16"
    weights = load_file(tmp_path / "checkpoints" / "step-00000002" / "drafter.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_the_environment_says_what_ran_where(evaluated: Path) -> None:
    facts = json.loads((evaluated / "run" / "environment.json").read_text())
    assert torch.__version__ in json.dumps(facts)
    assert facts["run"]["mode"] == "eager"
    assert "CPU" in facts["run"]["mode_why"]
    assert facts["run"]["target_devices"] == facts["run"]["drafter_devices"] == ["cpu"]
    assert facts["run"]["compute_dtype"] == "torch.float32"
    assert facts["run"]["num_steps"] == 12


def test_records_are_typed_and_in_order(evaluated: Path) -> None:
    records = list(read_records(evaluated / "run" / "records.jsonl"))
    assert [r.step for r in records if isinstance(r, StepRecord)] == [4, 8, 12]
    assert [r.step for r in records if isinstance(r, EvalRecord)] == [0, 6, 12]
    assert [r.step for r in records] == sorted(r.step for r in records)
    names = [r.name for r in records if isinstance(r, EventRecord)]
    assert names[0] == "warm_up"
    assert names[-1] == "waits"
    assert names.count("checkpoint") >= 1
    for record in records:
        if isinstance(record, StepRecord):
            assert math.isfinite(record.loss)
            assert record.accepted_tokens_per_block is not None
            assert 1.0 <= record.accepted_tokens_per_block <= 4.0
            assert 0.0 <= record.padding_share < 1.0
            assert record.tokens_per_s > 0


def test_the_waits_come_with_a_sentence(evaluated: Path) -> None:
    (waits,) = events_of(evaluated / "run", "waits")
    assert waits.detail["elapsed_s"] > 0
    assert {"target_for_slot_s", "drafter_for_features_s", "target_for_data_s"} < set(waits.detail)
    assert "cpu" in waits.detail["advice"] or "balanced" in waits.detail["advice"]


def test_waits_and_advice_are_of_the_time_in_which_steps_ran(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step lines show the same shares as the advice, however long anything else took."""
    slow_s, calls = 0.4, []
    for owner, name in ((Judge, "measure"), (Keeper, "save")):
        inner = getattr(owner, name)

        def slowly(self: object, *arguments: object, inner: Any = inner) -> object:  # noqa: ANN401
            calls.append(time.sleep(slow_s))
            return inner(self, *arguments)

        monkeypatch.setattr(owner, name, slowly)
    config = tiny_config(
        evaluated,
        data={"heldout": (str(evaluated / "heldout.txt"),)},
        optim={"max_steps": 12},
        eval={"every_steps": 2, "num_prompts": 1},
        checkpoint={"every_steps": 2},
    )
    outcome = run(config, tmp_path)
    assert outcome.waits is not None
    records = [r for r in read_records(tmp_path / "records.jsonl") if isinstance(r, StepRecord)]
    of_steps = {
        "elapsed_s": sum(4 * record.step_s for record in records),
        "target_for_slot_s": sum(4 * record.wait_target_s for record in records),
        "drafter_for_features_s": sum(4 * record.wait_drafter_s for record in records),
        "target_for_data_s": sum(4 * record.wait_data_s for record in records),
    }
    for name, seconds in of_steps.items():
        assert getattr(outcome.waits, name) == pytest.approx(seconds, abs=slow_s / 2), name
    assert len(calls) >= 12
    assert outcome.waits.elapsed_s < len(calls) * slow_s / 2, "12 steps take a fraction of that"


def test_only_a_checkpoint_that_was_measured_claims_a_tau(evaluated: Path, tmp_path: Path) -> None:
    del evaluated
    place = tmp_path / "place"
    write_target(place / "target")
    write_texts(place / "texts")
    (place / "heldout.txt").write_text("line 1 of file 99: 7\nline 2 of file 99: 14\n")
    config = tiny_config(
        place,
        data={"heldout": (str(place / "heldout.txt"),)},
        optim={"max_steps": 12},
        eval={"every_steps": 6, "num_prompts": 1},
        checkpoint={"every_steps": 4, "keep_last": 9},
    )
    run(config, tmp_path / "run")
    taus = {
        folder.name: json.loads((folder / "manifest.json").read_text())["metrics"]["tau"]
        for folder in (tmp_path / "run" / "checkpoints").glob("step-*")
    }
    measured = {f"step-{step:08d}" for step in (6, 12)}
    assert {name for name, tau in taus.items() if tau is not None} == measured & taus.keys()
    assert "step-00000012" in taus


def test_whoever_shows_learns_the_length_first(place: Path, tmp_path: Path) -> None:
    heard: list[object] = []
    options: dict[str, Any] = {
        "begin": lambda first, last: heard.append((first, last)),
        "show": lambda record: heard.append(record.kind),
    }
    config = tiny_config(place, optim={"max_steps": 8})
    run(config, tmp_path, max_steps=5, **options)
    assert heard[0] == (0, 5)
    heard.clear()
    run(config, tmp_path, **options)
    assert heard[0] == (5, 8)


def test_epochs_settle_the_number_of_steps(place: Path, tmp_path: Path) -> None:
    config = tiny_config(place, optim={"max_steps": None, "epochs": 2, "accumulate_steps": 3})
    outcome = run(config, tmp_path)
    packing = build(config, tmp_path / "data").data.packing
    num_batches = packing.batches_per_epoch(0) + packing.batches_per_epoch(1)
    assert outcome.num_steps == outcome.step == num_batches // 3
    assert steps_of(tmp_path)[-1]["epoch"] <= 2.0


def test_epochs_that_hold_less_than_a_step_are_refused(place: Path, tmp_path: Path) -> None:
    config = tiny_config(place, optim={"max_steps": None, "epochs": 1, "accumulate_steps": 999})
    with pytest.raises(DataError, match=r"1 epochs hold \d+ packed batches, but one step"):
        run(config, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"kind": "dpace"}},
        {"execution": {"activation_checkpointing": True}},
        {"optim": {"accumulate_steps": 3}},
    ],
    ids=str,
)
def test_every_way_to_train_learns_the_text(
    place: Path, tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    run(tiny_config(place, **changes), tmp_path)
    losses = [record["loss"] for record in steps_of(tmp_path)]
    assert losses[-1] < 0.95 * losses[0]


def test_recomputing_activations_changes_nothing_that_is_logged(
    place: Path, tmp_path: Path
) -> None:
    config = tiny_config(place, optim={"max_steps": 8})
    recomputed = tiny_config(
        place, optim={"max_steps": 8}, execution={"activation_checkpointing": True}
    )
    run(config, tmp_path / "plain")
    run(recomputed, tmp_path / "recomputed")
    assert steps_of(tmp_path / "plain") == steps_of(tmp_path / "recomputed")


def test_every_device_that_does_not_exist_is_named(place: Path, tmp_path: Path) -> None:
    config = tiny_config(
        place, target={"devices": ("cuda:77",)}, drafter={"devices": ("cuda:78", "cuda:79")}
    )
    with pytest.raises(ConfigError) as caught:
        run(config, tmp_path)
    for device in ("target.devices: there is no device cuda:77", "cuda:78", "cuda:79"):
        assert device in caught.value.what
    assert caught.value.exit_code == 2


def test_drafters_on_both_kinds_of_device_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = tiny_config(place, drafter={"devices": ("cpu", "cuda:0")})
    with pytest.raises(ConfigError, match="all be on CUDA devices or all on"):
        run(config, tmp_path)


def test_running_out_of_memory_before_the_threads_start_is_told_alike(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_arguments: object, **_options: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr("dflash.train.build.make_steps", out_of_memory)
    with pytest.raises(DeviceMemoryError, match="the main thread ran out of device memory") as told:
        run(tiny_config(place), tmp_path)
    assert told.value.exit_code == 11


def test_a_run_folder_that_is_a_file_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot be written: File exists") as caught:
        run(tiny_config(place), tmp_path / "file")
    assert caught.value.hint == "move away what is in its place, or choose another --run-dir"


def test_a_disk_that_is_full_for_records_is_told_in_a_sentence(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = RecordWriter.write

    def until_full(self: RecordWriter, record: Any) -> None:  # noqa: ANN401
        if record.step >= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(self, record)

    monkeypatch.setattr(RecordWriter, "write", until_full)
    with pytest.raises(UsageError, match=r"run folder .* cannot be written: No space left"):
        run(tiny_config(place), tmp_path)


def test_a_rehearsal_writes_nothing_and_measures_a_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(place.rglob("*"))
    seen = rehearse(tiny_config(place))
    assert math.isfinite(seen.loss)
    assert 2.0 < seen.loss < 20.0
    assert (seen.num_steps, seen.mode) == (40, "eager")
    assert [plan.device for plan in seen.plans] == ["cpu"]
    assert seen.plans[0].predicted_bytes > 0
    assert sorted(place.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_of_several_batches_a_step_goes_through_a_whole_round(place: Path) -> None:
    seen = rehearse(tiny_config(place, optim={"accumulate_steps": 3}))
    once = rehearse(tiny_config(place))
    assert seen.loss == pytest.approx(once.loss, rel=1e-6)  # three times the same batch


def test_a_tau_of_another_step_is_not_the_ends(evaluated: Path, tmp_path: Path) -> None:
    config = tiny_config(
        evaluated,
        data={"heldout": (str(evaluated / "heldout.txt"),)},
        optim={"max_steps": 40},
        eval={"every_steps": 6, "num_prompts": 1},
    )
    outcome = run(config, tmp_path / "run", max_steps=8)
    assert (outcome.step, outcome.tau) == (8, None)  # measured after 6
    assert outcome.tau_before is not None


def test_others_may_read_what_a_run_writes(evaluated: Path) -> None:
    written = [path for path in (evaluated / "run").rglob("*") if path.suffix == ".safetensors"]
    assert len(written) >= 3  # prepared data, weights, optimizer
    (evaluated / "new").touch()
    usual = stat.S_IMODE((evaluated / "new").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {usual}
