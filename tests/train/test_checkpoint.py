"""A checkpoint is whole or not there, is kept by rule, and is refused when it cannot be trusted."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import tiny_drafter

import dflash.train.checkpoint as checkpoint_module
from dflash.errors import CheckpointError, UsageError
from dflash.records import EventRecord, RecordWriter
from dflash.train.checkpoint import Keeper, Progress, Snapshot, resume_from
from dflash.train.resumption import read_start, start_of
from dflash.train.stored import TargetRef, complete_checkpoints

GOLDEN = Path(__file__).parents[1] / "golden"
CONTRACT = {"seed": 0, "target.taps": [0, 2], "data.token_budget": 128}
PROGRESS = Progress(
    tokens=100,
    positions=128,
    batches=1,
    tokens_since_record=0,
    positions_since_record=0,
    best_tau=1.5,
)


def snapshot(step: int, *, tau: float | None = None) -> Snapshot:
    drafter = tiny_drafter(seed=step)
    return Snapshot(
        step=step,
        shape=drafter.shape,
        target=TargetRef(source="targets/tiny", fingerprint="f" * 64),
        weights=dict(drafter.named_parameters()),
        state={"step": torch.tensor(float(step)), "totals": torch.arange(3.0)},
        contract=CONTRACT,
        progress=PROGRESS,
        config_toml="seed = 0\n",
        tau=tau,
    )


def keeper(run_dir: Path, *, keep_last: int = 3, keep_best: bool = True) -> Keeper:
    return Keeper(run_dir, keep_last=keep_last, keep_best=keep_best)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return keeper(tmp_path).save(snapshot(20))


def test_a_checkpoint_gives_back_what_went_in(saved: Path) -> None:
    resumed = resume_from(saved, CONTRACT)
    assert (resumed.step, resumed.progress, resumed.tau) == (20, PROGRESS, None)
    assert resumed.config_toml == "seed = 0\n"
    for name, weight in snapshot(20).weights.items():
        assert torch.equal(resumed.weights[name], weight)
    assert float(resumed.state["step"]) == 20.0
    assert torch.equal(resumed.state["totals"], torch.arange(3.0))


def test_the_newest_are_kept_and_the_rest_dropped(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        keeper(tmp_path, keep_last=2).save(snapshot(step))
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_the_best_is_kept_too_and_named(tmp_path: Path) -> None:
    for step, tau in ((10, 1.2), (20, 1.9), (30, None), (40, 1.9), (50, 1.4)):
        keeper(tmp_path, keep_last=1).save(snapshot(step, tau=tau))
    assert names(tmp_path) == ["best", "step-00000020", "step-00000050"]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000020\n"


def test_the_best_is_named_again_after_a_kill_between_checkpoint_and_name(tmp_path: Path) -> None:
    keeper(tmp_path).save(snapshot(10, tau=1.2))
    keeper(tmp_path).save(snapshot(20, tau=1.9))
    (tmp_path / "checkpoints" / "best").write_text("step-00000010\n")  # as the kill left it
    keeper(tmp_path).save(snapshot(30, tau=1.5))
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000020\n"


def test_without_keep_best_no_name_goes_stale(tmp_path: Path) -> None:
    keeper(tmp_path).save(snapshot(10, tau=1.9))
    for step in (20, 30):
        keeper(tmp_path, keep_last=1, keep_best=False).save(snapshot(step, tau=1.0))
    assert names(tmp_path) == ["step-00000030"]


def test_what_a_kill_left_half_written_is_swept_and_nothing_else(tmp_path: Path) -> None:
    keeper(tmp_path).save(snapshot(10))
    folder = tmp_path / "checkpoints"
    (folder / "step-00000020.partial").mkdir()
    (folder / "step-00000020.partial" / "drafter.safetensors").write_bytes(b"half")
    (folder / "notes.partial").mkdir()
    keeper(tmp_path).sweep()
    assert names(tmp_path) == ["notes.partial", "step-00000010"]


def test_a_step_without_its_manifest_is_set_aside_whole_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    keeping = Keeper(tmp_path, keep_last=3, keep_best=True, say=said.append)
    for step in (10, 20):
        (keeping.save(snapshot(step)) / "notes").write_text("mine")
    folder = tmp_path / "checkpoints"
    for turn in (1, 2):
        (folder / "step-00000020" / "manifest.json").unlink()
        before = sorted(path.name for path in (folder / "step-00000020").iterdir())
        (keeping.sweep if turn == 1 else lambda: keeping.save(snapshot(20)))()
        aside = folder / f"step-00000020.incomplete-{turn}"
        assert said.pop() == (
            f"the checkpoint {folder / 'step-00000020'} is incomplete (it has no manifest.json) and"
            f" was set aside as {aside.name}"
        )
        assert sorted(path.name for path in aside.iterdir()) == before
        assert start_of(tmp_path, "auto") == keeping.newest()
        keeping.save(snapshot(20))
        assert resume_from(folder / "step-00000020", CONTRACT).step == 20
    assert said == []
    assert "step-00000010" in names(tmp_path)


def test_a_file_in_the_place_of_a_step_is_set_aside_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000020").write_text("mine")
    keeper(tmp_path).sweep()
    keeper(tmp_path).save(snapshot(20))
    assert names(tmp_path) == ["step-00000020", "step-00000020.incomplete-1"]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "free some space and run"),
        (errno.EACCES, "get the right to write there and run"),
        (errno.EROFS, "make that file system writable and run"),
        (errno.ENOTEMPTY, "move away what is in its place and run"),
        (errno.EIO, "see to what the system reports and run"),
    ],
)
@pytest.mark.parametrize("rust", [False, True])
def test_the_hint_follows_from_what_the_file_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, number: int, says: str, rust: bool
) -> None:
    def failing(*_args: object, **_kwargs: object) -> NoReturn:
        if rust:
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_module, "save_file", failing)
    with pytest.raises(CheckpointError) as caught:
        keeper(tmp_path).save(snapshot(20))
    assert os.strerror(number) in caught.value.what
    assert caught.value.hint.startswith(says)
    assert caught.value.hint.endswith("there is no complete one yet")


def full_disk(*_args: object, **_kwargs: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_file", "os.fsync", "Path.write_text", "Path.rename"])
def test_a_full_disk_leaves_earlier_checkpoints_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    keeper(tmp_path).save(snapshot(10))
    owner: Any = {"save_file": checkpoint_module, "os.fsync": os}.get(where, Path)
    monkeypatch.setattr(owner, where.rpartition(".")[2], full_disk)
    with pytest.raises(CheckpointError) as caught:
        keeper(tmp_path).save(snapshot(20))
    monkeypatch.undo()
    assert caught.value.exit_code == 13
    assert "step 20 cannot be written to" in caught.value.what
    assert caught.value.what.endswith("No space left on device")
    assert "the last complete one is step-00000010" in caught.value.hint
    assert names(tmp_path) == ["step-00000010"]
    assert resume_from(tmp_path / "checkpoints" / "step-00000010", CONTRACT).step == 10


def flip_bit(folder: Path, name: str, *, at: int = -5) -> None:
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)


def truncate(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def set_version(folder: Path, version: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))


def become_zlab(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)


def forget_progress(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["progress"]["batches"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def say_step(folder: Path, step: int) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": step}))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda f: flip_bit(f, "drafter.safetensors"), r"damaged: sha256 of drafter.safetensors"),
        (lambda f: flip_bit(f, "optimizer.safetensors"), r"damaged: sha256 of optimizer.safet"),
        (lambda f: flip_bit(f, "config.toml"), r"damaged: sha256 of config.toml"),
        (lambda f: truncate(f, "optimizer.safetensors"), r"damaged: sha256 of optimizer.safet"),
        (lambda f: truncate(f, "manifest.json"), r"manifest.json is not readable JSON"),
        (lambda f: (f / "optimizer.safetensors").unlink(), r"optimizer.safetensors is missing"),
        (lambda f: set_version(f, 0), r"has checkpoint format 0, this version reads 1"),
        (lambda f: set_version(f, 2), r"has checkpoint format 2, this version reads 1"),
        (forget_progress, r"manifest.json is damaged: progress.batches: Field required"),
        (lambda f: say_step(f, 7), r"is named after step 20, but its manifest.json says step 7"),
        (become_zlab, r"holds a drafter but no optimizer state"),
    ],
)
def test_what_cannot_be_trusted_is_refused_in_a_sentence(
    saved: Path, harm: Callable[[Path], None], says: str
) -> None:
    harm(saved)
    with pytest.raises(CheckpointError, match=says) as caught:
        resume_from(saved, CONTRACT)
    assert caught.value.exit_code == 13
    assert "\n" not in caught.value.what


def test_every_contradiction_is_named_at_once(saved: Path) -> None:
    other = CONTRACT | {"seed": 1, "target.taps": [1, 2], "new.key": True}
    with pytest.raises(CheckpointError) as caught:
        resume_from(saved, other)
    assert "seed = 0 there, 1 here" in caught.value.what
    assert "target.taps = [0, 2] there, [1, 2] here" in caught.value.what
    assert "new.key = nothing there, true here" in caught.value.what
    assert "token_budget" not in caught.value.what
    assert "another --run-dir" in caught.value.hint


def test_a_damaged_newest_checkpoint_says_which_one_comes_before_it(tmp_path: Path) -> None:
    for step in (10, 20):
        newest = keeper(tmp_path).save(snapshot(step))
    flip_bit(newest, "drafter.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_start(newest, CONTRACT)
    assert caught.value.hint == "remove that folder to go on from step-00000010"


@pytest.mark.parametrize(
    "harm", [lambda f: say_step(f, 7), lambda f: truncate(f, "manifest.json")], ids=["step", "half"]
)
def test_an_older_checkpoint_that_would_end_the_next_save_is_refused_before(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    older, _ = (keeper(tmp_path).save(snapshot(step)) for step in (10, 20))
    keeper(tmp_path).require_readable()
    harm(older)
    with pytest.raises(CheckpointError, match="step-00000010") as caught:
        keeper(tmp_path).require_readable()
    assert "move" in caught.value.hint
    keeper(tmp_path, keep_best=False).require_readable()  # no save compares them then
    keeper(tmp_path, keep_best=False, keep_last=1).save(snapshot(30))


def test_the_step_of_a_folder_with_a_name_of_its_own_is_the_manifests(saved: Path) -> None:
    (saved.parent / "mine").symlink_to(saved)
    assert resume_from(saved.parent / "mine", CONTRACT).step == 20


def test_auto_takes_the_newest_complete_one(tmp_path: Path) -> None:
    assert start_of(tmp_path, "auto") is None
    for step in (10, 20):
        keeper(tmp_path).save(snapshot(step))
    (tmp_path / "checkpoints" / "step-00000030").mkdir()  # no manifest: not complete
    assert start_of(tmp_path, "auto") == complete_checkpoints(tmp_path)[-1]
    assert complete_checkpoints(tmp_path)[-1].name == "step-00000020"


def test_never_starts_anew_only_where_nothing_is(tmp_path: Path) -> None:
    assert start_of(tmp_path, "never") is None
    keeper(tmp_path).save(snapshot(10))
    with pytest.raises(CheckpointError, match="already holds a run with 1 checkpoints"):
        start_of(tmp_path, "never")


def begin(run_dir: Path, checkpoint: Path) -> None:
    """Record that the run in *run_dir* began from *checkpoint*."""
    with RecordWriter(run_dir / "records.jsonl") as writer:
        detail = {"checkpoint": checkpoint.name, "from": str(checkpoint)}
        writer.write(EventRecord(step=10, name="resumed", detail=detail))


def test_a_path_starts_an_empty_folder_which_then_goes_on_by_itself(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for step in (10, 20):
        keeper(first).save(snapshot(step))
    assert start_of(second, str(first)) == first / "checkpoints" / "step-00000020"
    older = first / "checkpoints" / "step-00000010"
    assert start_of(second, str(older)) == older
    begin(second, older)
    keeper(second).save(snapshot(30))
    assert start_of(second, str(older)) == second / "checkpoints" / "step-00000030"
    assert start_of(second, str(second)) == second / "checkpoints" / "step-00000030"


@pytest.mark.parametrize("began_there", [False, True])
def test_a_path_is_never_left_aside_for_the_run_that_is_there(
    tmp_path: Path, *, began_there: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for step in (10, 20):
        keeper(first).save(snapshot(step))
    if began_there:  # but not where the path points now
        begin(second, first / "checkpoints" / "step-00000010")
    keeper(second).save(snapshot(30))
    with pytest.raises(UsageError) as caught:
        start_of(second, str(first))
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.what
    assert f"--resume {first}: {second} already holds a run of its own" in caught.value.what
    assert f"leave --resume out to go on with {second}" in caught.value.hint
    assert "another --run-dir" in caught.value.hint


def test_an_earlier_checkpoint_of_the_same_folder_would_meet_its_own_future(tmp_path: Path) -> None:
    for step in (10, 20):
        keeper(tmp_path).save(snapshot(step))
    newest = tmp_path / "checkpoints" / "step-00000020"
    assert start_of(tmp_path, str(newest)) == newest
    with pytest.raises(CheckpointError, match="holds later checkpoints, up to step-00000020"):
        start_of(tmp_path, str(tmp_path / "checkpoints" / "step-00000010"))


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint folder at"):
        start_of(tmp_path, str(tmp_path / "nowhere"))
