"""Stopping and going on leaves no trace: the same bits, the same records, nothing twice."""

import fcntl
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import (
    assert_same_tensors,
    checkpoint,
    events_of,
    run,
    steps_of,
    tiny_config,
    wait_for_main,
    write_target,
    write_texts,
)

from dflash.config import RunConfig
from dflash.errors import CheckpointError, NonFiniteError, UsageError
from dflash.records import EvalRecord, read_records
from dflash.train.folder import claimed


def with_prompts(place: Path, **changes: dict[str, Any]) -> RunConfig:
    changes.setdefault("eval", {})["every_steps"] = 10
    changes["data"] = {"heldout": (str(place / "texts" / "text-0.txt"),)} | changes.get("data", {})
    changes["data"]["train"] = (str(place / "texts" / "text-1.txt"), str(place / "texts2"))
    return tiny_config(place, **changes)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps without a stop."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    run(tiny_config(place), run_dir)
    return run_dir


def test_forty_steps_are_twenty_and_twenty(place: Path, tmp_path: Path, whole: Path) -> None:
    first = run(tiny_config(place), tmp_path, max_steps=20)
    assert (first.step, first.num_steps, first.signal) == (20, 40, None)
    second = run(tiny_config(place), tmp_path)
    assert second.step == 40
    assert_same_tensors(checkpoint(tmp_path, 40), checkpoint(whole, 40))
    assert steps_of(tmp_path) == steps_of(whole)
    assert [record["step"] for record in steps_of(tmp_path)] == list(range(4, 41, 4))


@pytest.mark.parametrize("stop_at", [1, 6, 21])
def test_a_stop_between_two_records_changes_neither(
    place: Path, tmp_path: Path, *, whole: Path, stop_at: int
) -> None:
    """Records come every 4 steps; half an interval's sums go through the checkpoint."""
    run(tiny_config(place), tmp_path, max_steps=stop_at)
    run(tiny_config(place), tmp_path)
    assert_same_tensors(checkpoint(tmp_path, 40), checkpoint(whole, 40))
    assert steps_of(tmp_path) == steps_of(whole)


def test_accumulated_steps_go_on_exactly_too(place: Path, tmp_path: Path) -> None:
    config = tiny_config(place, optim={"accumulate_steps": 2, "max_steps": 10})
    run(config, tmp_path / "whole")
    run(config, tmp_path / "parts", max_steps=7)
    run(config, tmp_path / "parts")
    assert_same_tensors(checkpoint(tmp_path / "parts", 10), checkpoint(tmp_path / "whole", 10))
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")


def test_records_after_the_checkpoint_are_written_again_not_twice(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    """As after a kill: records up to step 38 exist, the newest checkpoint is of step 20."""
    run(tiny_config(place), tmp_path, max_steps=20)
    records = tmp_path / "records.jsonl"
    later = [
        line
        for line in (whole / "records.jsonl").read_bytes().splitlines(keepends=True)
        if b'"step":24' in line or b'"step":28' in line
    ]
    assert later
    records.write_bytes(records.read_bytes() + b"".join(later) + b'{"kind":"step","st')
    run(tiny_config(place), tmp_path)
    assert steps_of(tmp_path) == steps_of(whole)


def test_a_run_killed_before_its_first_checkpoint_starts_its_records_anew(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    run(tiny_config(place, checkpoint={"every_steps": 40}), tmp_path, max_steps=12)
    for folder in (tmp_path / "checkpoints").iterdir():
        folder.rename(tmp_path / "gone")
    run(tiny_config(place), tmp_path)
    assert steps_of(tmp_path) == steps_of(whole)
    assert len(events_of(tmp_path, "warm_up")) == 1


def test_a_step_that_lost_its_manifest_is_named_and_trained_again(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    for last_step in (20, 40):
        run(tiny_config(place), tmp_path, max_steps=last_step)
    lost = tmp_path / "checkpoints" / "step-00000040"
    (lost / "manifest.json").unlink()
    said: list[str] = []
    assert run(tiny_config(place), tmp_path, say=said.append).step == 40
    assert len([line for line in said if str(lost) in line and "incomplete" in line]) == 1
    assert_same_tensors(checkpoint(tmp_path, 40), checkpoint(whole, 40))
    assert (tmp_path / "checkpoints" / "step-00000040.incomplete-1").is_dir()
    (told,) = events_of(tmp_path, "set_aside")
    assert (told.step, told.detail) == (20, {"folder": "step-00000040.incomplete-1"})


def test_measurements_and_the_best_checkpoint_go_on(tmp_path: Path) -> None:
    place = tmp_path / "place"
    write_target(place / "target")
    write_texts(place / "texts", num_files=4)
    write_texts(place / "texts2")
    config = with_prompts(place, checkpoint={"every_steps": 100, "keep_last": 1})
    run(config, tmp_path / "whole")
    run(config, tmp_path / "parts", max_steps=13)
    outcome = run(config, tmp_path / "parts")
    taus = {
        name: [
            (record.step, record.tau_per_prompt)
            for record in read_records(tmp_path / name / "records.jsonl")
            if isinstance(record, EvalRecord)
        ]
        for name in ("whole", "parts")
    }
    assert [step for step, _ in taus["whole"]] == [0, 10, 20, 30, 40]
    assert taus["parts"] == taus["whole"]
    assert outcome.tau is not None
    best = [(tmp_path / name / "checkpoints" / "best") for name in ("whole", "parts")]
    assert best[0].exists() == best[1].exists()
    assert not best[0].exists() or best[0].read_text() == best[1].read_text()
    assert_same_tensors(checkpoint(tmp_path / "parts", 40), checkpoint(tmp_path / "whole", 40))


def test_a_run_is_not_begun_elsewhere_for_no_step(place: Path, whole: Path, tmp_path: Path) -> None:
    said = f"--resume {whole} is at step 40 already, and 40 steps are asked for"
    with pytest.raises(UsageError, match=re.escape(said)):
        run(tiny_config(place), tmp_path / "new", resume=str(whole))
    assert not (tmp_path / "new" / "records.jsonl").exists()
    assert run(tiny_config(place), whole, resume=str(whole)).suggestion.startswith("nothing to do")


def test_a_run_that_is_complete_does_nothing_when_called_again(place: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (whole / "checkpoints").rglob("*")}
    records = (whole / "records.jsonl").read_bytes()
    outcome = run(tiny_config(place), whole)
    assert (outcome.step, outcome.waits) == (40, None)
    assert outcome.suggestion == "nothing to do: the last step asked for is 40"
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.name == "step-00000040"
    assert {p: p.stat().st_mtime_ns for p in (whole / "checkpoints").rglob("*")} == before
    assert (whole / "records.jsonl").read_bytes() == records


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_a_complete_checkpoint(
    place: Path, tmp_path: Path, *, whole: Path, signum: int
) -> None:
    def shown(record: Any) -> None:  # noqa: ANN401
        if record.kind == "step" and record.step == 8:
            os.kill(os.getpid(), signum)
            wait_for_main()

    outcome = run(tiny_config(place), tmp_path, show=shown)
    assert outcome.signal == signum
    assert 8 <= outcome.step < 40
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.name == f"step-{outcome.step:08d}"
    (stopped,) = events_of(tmp_path, "stopped")
    assert stopped.detail == {"signal": signum}
    run(tiny_config(place), tmp_path)
    assert_same_tensors(checkpoint(tmp_path, 40), checkpoint(whole, 40))


def test_sigusr2_makes_a_checkpoint_and_the_run_goes_on(place: Path, tmp_path: Path) -> None:
    def shown(record: Any) -> None:  # noqa: ANN401
        if record.kind == "step" and record.step == 8:
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_for_main()

    outcome = run(tiny_config(place), tmp_path, show=shown)
    assert (outcome.step, outcome.signal) == (40, None)
    saved = [event.step for event in events_of(tmp_path, "checkpoint")]
    assert saved == [8, 20, 40]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": {"taps": (0, 1)}}, r"target\.taps = \[0, 2\] there, \[0, 1\] here"),
        ({"drafter": {"block_size": 8}}, r"drafter\.block_size = 4 there, 8 here"),
        ({"drafter": {"mask_token_id": 103}}, r"mask_token_id"),
        ({"data": {"token_budget": 256}}, r"data\.token_budget = 128 there, 256 here"),
        ({"data": {"anchor_density": 0.5}}, r"data\.anchor_density = 0\.125 there, 0\.5 here"),
        ({"data": {"max_document_tokens": 32}}, r"data\.sha256 = .*max_document_tokens = 64 there"),
        ({"objective": {"kind": "dpace"}}, r'objective\.kind = "decay" there, "dpace" here'),
        ({"optim": {"accumulate_steps": 3}}, r"packed batches per step = 1 there, 3 here"),
    ],
)
def test_a_configuration_that_contradicts_the_checkpoint_is_refused(
    place: Path, whole: Path, *, changes: dict[str, dict[str, Any]], says: str
) -> None:
    before = (whole / "config.toml").read_bytes(), (whole / "records.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=says) as caught:
        run(tiny_config(place, **changes), whole)
    assert caught.value.exit_code == 13
    assert "contradicts this run" in caught.value.what
    assert before == ((whole / "config.toml").read_bytes(), (whole / "records.jsonl").read_bytes())


def test_another_seed_is_another_run(place: Path, whole: Path) -> None:
    with pytest.raises(CheckpointError, match="seed = 0 there, 7 here"):
        run(tiny_config(place).model_copy(update={"seed": 7}), whole)


def test_another_target_of_the_same_shape_is_refused(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    write_target(tmp_path / "target", seed=1)
    config = tiny_config(place, target={"model": str(tmp_path / "target")})
    with pytest.raises(CheckpointError, match=r'target\.fingerprint = "'):
        run(config, whole)


def test_settings_that_may_change_are_told_when_they_do(place: Path, tmp_path: Path) -> None:
    run(tiny_config(place), tmp_path, max_steps=4)
    run(tiny_config(place, optim={"lr": 1e-3}), tmp_path, max_steps=8)
    (resumed,) = events_of(tmp_path, "resumed")
    assert resumed.detail["changed"] == {"optim.lr": "0.003 -> 0.001"}


def test_never_refuses_a_used_folder_before_it_loads_anything(place: Path, whole: Path) -> None:
    broken = tiny_config(place, target={"model": "/nowhere"})
    with pytest.raises(CheckpointError, match="--resume never would mix two runs"):
        run(broken, whole, resume="never")


def test_a_run_goes_on_in_another_folder(place: Path, tmp_path: Path, whole: Path) -> None:
    run(tiny_config(place), tmp_path / "first", max_steps=20)
    run(tiny_config(place), tmp_path / "second", resume=str(tmp_path / "first"))
    assert_same_tensors(checkpoint(tmp_path / "second", 40), checkpoint(whole, 40))
    assert not (tmp_path / "first" / "checkpoints" / "step-00000040").exists()


def test_the_command_that_began_in_another_folder_goes_on_when_it_is_given_again(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    run(tiny_config(place), tmp_path / "first", max_steps=20)
    for last_step in (30, 40):
        options = {"resume": str(tmp_path / "first"), "max_steps": last_step}
        assert run(tiny_config(place), tmp_path / "second", **options).step == last_step
    assert_same_tensors(checkpoint(tmp_path / "second", 40), checkpoint(whole, 40))
    first, second = events_of(tmp_path / "second", "resumed")
    assert (first.step, second.step) == (20, 30)
    assert first.detail["from"] == str(tmp_path / "first" / "checkpoints" / "step-00000020")
    with pytest.raises(UsageError, match="already holds a run of its own"):
        run(tiny_config(place), whole, resume=str(tmp_path / "first"))


def test_two_processes_cannot_train_into_one_folder(place: Path, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is training into") as caught:
            run(tiny_config(place), tmp_path)
    assert caught.value.exit_code == 2
    assert run(tiny_config(place), tmp_path, max_steps=1).step == 1


def test_a_lock_that_was_removed_under_its_holder_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the process that held the new folder gave it up."""
    lock, locked = tmp_path / "run" / ".lock", []

    def flock(file: Any, how: int) -> None:  # noqa: ANN401
        if not locked:
            lock.unlink()
        locked.append(os.fstat(file.fileno()).st_ino)
        fcntl_flock(file, how)

    fcntl_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed(tmp_path / "run"):
        assert lock.stat().st_ino == locked[-1] != locked[0]
        (tmp_path / "run" / "config.toml").touch()
    assert lock.exists(), "what holds a run is left as it is"


def test_a_run_starts_from_exported_weights(place: Path, tmp_path: Path, whole: Path) -> None:
    from dflash.train.export import export_zlab
    from dflash.train.stored import open_checkpoint

    export_zlab(open_checkpoint(whole), tmp_path / "exported")
    config = tiny_config(place, drafter={"init_from": str(tmp_path / "exported")})
    run(config, tmp_path / "run", max_steps=1)
    (first,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    started = load_file(tmp_path / "exported" / "model.safetensors")
    now = load_file(first / "drafter.safetensors")
    far = [n for n in now if (now[n] - started[n].float()).abs().max() > 2 * config.optim.lr]
    assert far == [], "one step moves a weight by no more than about its learning rate"
    other = tiny_config(place, drafter={"init_from": str(tmp_path / "exported"), "block_size": 8})
    with pytest.raises(CheckpointError) as caught:
        run(other, tmp_path / "other")
    assert caught.value.what == (
        f'drafter.init_from = "{tmp_path / "exported"}" holds another drafter than this run\'s:'
        " drafter.block_size = 4 there, 8 here"
    )
    assert caught.value.hint == "set drafter.block_size = 4"
    other = tiny_config(
        place,
        target={"taps": (0, 1)},
        drafter={"init_from": str(Path(__file__).parents[1] / "golden")},
    )
    with pytest.raises(CheckpointError) as caught:
        run(other, tmp_path / "foreign")
    assert "target.taps = [1, 2, 3, 4] there, [0, 1] here" in caught.value.what
    assert "the target's vocab_size = " in caught.value.what
    assert "made for another target" in caught.value.hint


def test_a_step_that_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(
    place: Path, tmp_path: Path
) -> None:
    run(tiny_config(place), tmp_path, max_steps=20)
    with pytest.raises(NonFiniteError, match=r"step \d+: .*text-\d+\.txt:\d+") as caught:
        run(tiny_config(place, optim={"lr": 1e30}), tmp_path)
    assert caught.value.exit_code == 10
    assert "the last checkpoint is step-00000020" in caught.value.hint
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert all(bool(t.isfinite().all()) for t in load_file(newest / "drafter.safetensors").values())
    assert newest.name == "step-00000020"
    assert torch.isfinite(torch.tensor([record["loss"] for record in steps_of(tmp_path)])).all()
    with pytest.raises(NonFiniteError) as caught:
        run(tiny_config(place, optim={"lr": 1e30}), tmp_path / "anew")
    assert caught.value.hint.startswith("there is no checkpoint yet; look at these documents")
