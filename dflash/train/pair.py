"""A stored drafter together with the target it was trained for, ready to decode."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dflash.config import RunConfig, load
from dflash.data.prepare import prepare
from dflash.data.prompt_files import require_prompts
from dflash.data.prompts import heldout_prompts
from dflash.data.sources import find_sources
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterShape
from dflash.errors import CheckpointError, UsageError
from dflash.execution import use_device
from dflash.target.loading import called, resolve_source
from dflash.target.model import Target
from dflash.train.stored import (
    MANIFEST,
    RUN_CONFIG,
    StoredDrafter,
    find_checkpoint,
    open_checkpoint,
    read_manifest,
    read_zlab_shape,
    run_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """``is_its_target`` is False for another target than the one trained with, None if unknown."""

    stored: StoredDrafter
    target: Target
    target_source: str
    drafter: Drafter
    is_its_target: bool | None


def load_pair(
    path: Path,
    *,
    target: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Pair:
    """Read the drafter at *path* and load its target, or the one that *target* names.

    Both run in bf16 on cuda and in fp32 on the CPU. The device is the calling thread's own from
    then on.

    Raises:
        CheckpointError: no drafter there, or it does not fit the target.
        UsageError: no such device, or nothing says which target.
        MissingError: the target is not where the checkpoint says.
    """
    stored = open_checkpoint(path)
    source = target or stored.target_source
    if source is None:
        raise _no_target(path)
    place = check_device(device)
    use_device(place)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    with _called(path, target):
        loaded = Target.load(
            source,
            taps=stored.shape.target_layer_ids,
            device=str(place),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    check_fit(stored.shape, loaded, source)
    trained_with = stored.target_fingerprint
    same = None if trained_with is None else trained_with == loaded.fingerprint
    if same is False and target is None:
        raise CheckpointError(
            f"the target at {source} is not the one that {stored.path} was trained with: its "
            f"fingerprint is {loaded.fingerprint[:12]}...",
            hint="name a target with --target to use it all the same",
        )
    return Pair(
        stored=stored,
        target=loaded,
        target_source=source,
        drafter=stored.drafter(device=place, dtype=dtype),
        is_its_target=same,
    )


def require_pair(path: Path, *, target: str | None = None) -> None:
    """Find out, before anything large is read, what of ``load_pair`` is not there.

    Raises:
        CheckpointError, UsageError, MissingError: as ``load_pair``.
    """
    folder = find_checkpoint(path)
    if (folder / MANIFEST).is_file():
        source = target or read_manifest(folder).target.source
    else:
        read_zlab_shape(folder)
        source = target or ""
    if not source:
        raise _no_target(path)
    with _called(path, target):
        resolve_source(source)


def require_prompts_of(path: Path, prompts: str | None) -> None:
    """Find out the same about *prompts*, and without any about what ``heldout_of`` reads.

    Raises:
        UsageError, DataError, MissingError: there are none.
    """
    if prompts is not None:
        require_prompts(prompts)
    else:
        find_sources(_run_config(find_checkpoint(path)).data.heldout)


def heldout_of(pair: Pair, num_prompts: int | None = None) -> list[list[int]]:
    """Return the prompts of the run's own evaluations; nothing is written into the run folder.

    Raises:
        UsageError: the drafter lies in no run folder, or its run has no held-out data.
        DataError: that data cannot be read any more.
    """
    config = _run_config(pair.stored.path)
    with TemporaryDirectory(prefix="dflash-eval-") as folder:
        dataset = prepare(
            config.data.heldout,
            Path(folder) / "heldout",
            tokenizer=pair.target.tokenizer,
            max_document_tokens=config.data.max_document_tokens,
            max_bad_share=config.data.max_bad_share,
            vocab_size=pair.target.vocab_size,
        )
        count = num_prompts or config.eval.num_prompts
        return heldout_prompts(dataset, num_prompts=count, seed=config.seed)


def _run_config(checkpoint: Path) -> RunConfig:
    """The configuration of the run that *checkpoint* lies in; it has held-out data."""
    run_dir = run_of(checkpoint)
    path = None if run_dir is None else run_dir / RUN_CONFIG
    if path is None or not path.is_file():
        raise UsageError(
            f"{checkpoint} lies in no run folder, so there are no held-out prompts",
            hint="give some with --prompts",
        )
    config = load(path).config
    if not config.data.heldout:
        raise UsageError(f"{path} names no data.heldout", hint="give prompts with --prompts")
    return config


def _called(path: Path, target: str | None) -> AbstractContextManager[None]:
    """What errors call the target: the option, or that it is the one of the drafter at *path*."""
    if target is not None:
        return called("--target")
    return called(f"the target of {path}", elsewhere="say with --target where it is")


def _no_target(path: Path) -> UsageError:
    what = f"{path} does not say which target it belongs to"
    return UsageError(what, hint="name it with --target")


def check_device(name: str) -> torch.device:
    """Return the device called *name*; "auto" is cuda:0 if there is one, else cpu.

    Raises:
        UsageError: there is none.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    known = ["cpu", *(f"cuda:{index}" for index in range(count))]
    full = "cuda:0" if name == "cuda" else name
    if full not in known:
        raise UsageError(f"there is no device {name!r} here", hint=f"there is {', '.join(known)}")
    return torch.device(full)


def check_fit(shape: DrafterShape, target: Target, source: str) -> None:
    """Refuse a target whose sizes are not those that the drafter was trained for.

    Raises:
        CheckpointError: names every size that differs.
    """
    differences = [
        f"its {name} is {ours}, the target's {theirs}"
        for name, ours, theirs in (
            ("hidden_size", shape.hidden_size, target.hidden_size),
            ("number of target layers", shape.num_target_layers, target.num_layers),
        )
        if ours != theirs
    ]
    if shape.mask_token_id >= target.vocab_size:
        differences.append(
            f"its mask token {shape.mask_token_id} is outside the target's {target.vocab_size} rows"
        )
    if differences:
        raise CheckpointError(
            f"the drafter does not fit the target at {source}: {'; '.join(differences)}"
        )
