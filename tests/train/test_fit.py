"""A plan is held against the memory there is; what cannot fit is refused with what would help."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import run, tiny_config

from dflash.config import load
from dflash.errors import DeviceMemoryError
from dflash.target.sizes import read_sizes
from dflash.train import build
from dflash.train import run as run_module
from dflash.train.fit import OUTSIDE_BYTES, advised, require_fit, require_room
from dflash.train.forecast import forecast
from dflash.train.memory import GIB, RunSizes, memory_plan, run_sizes

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> RunSizes:
    """The shipped 6 + 2 layout, without activation checkpointing."""
    monkeypatch.chdir(CONFIGS.parent)
    config = load(CONFIGS / "original-6x2.toml").config
    sizes = run_sizes(config, read_sizes(config.target), num_cuda=0, fused=True)
    return replace(sizes, checkpoint=False)


def plan_of(sizes: RunSizes, device: str) -> dict[str, int]:
    return next(plan.items for plan in memory_plan(sizes) if plan.device == device)


def total(sizes: RunSizes, device: str) -> int:
    return sum(plan_of(sizes, device).values())


def test_the_original_layout_is_planned_from_first_principles(original: RunSizes) -> None:
    """Counted here from the published numbers of Qwen3-8B and its drafter."""
    target, drafter = plan_of(original, "cuda:0"), plan_of(original, "cuda:6")
    num = 5 * (4096 * 12288 * 3 + 4096 * 4096 * 2 + 4096 * 1024 * 2 + 2 * 128 + 2 * 4096)
    num += 5 * 4096 * 4096 + 2 * 4096
    assert drafter["bf16 weights"] == 2 * num
    assert drafter["fp32 masters"] == 4 * num
    assert drafter["AdamW moments"] == 8 * num
    assert drafter["fp32 sums of gradients"] == 4 * num, "two batches a step are added up"
    features = 49152 * 5 * 4096 * 2
    assert drafter["feature slots"] == pytest.approx(3 * features, rel=0.01), (
        "6 targets, 2 drafters"
    )
    assert drafter["the step's own batch"] == pytest.approx(features, rel=0.01)
    assert target["batches on their way"] == pytest.approx(2 * features, rel=0.01)
    assert drafter["embedding and LM head"] == 2 * 151936 * 4096 * 2
    assert target["target weights"] == pytest.approx(8.19e9 * 2, rel=0.001)
    assert len(memory_plan(original)) == 8


def test_drafters_on_one_gpu_add_up_and_share_it_with_the_target(original: RunSizes) -> None:
    alone = replace(original, targets=("cuda:1",), drafters=("cuda:0",))
    both = replace(alone, drafters=("cuda:0", "cuda:0"))
    tables = plan_of(alone, "cuda:0")["embedding and LM head"]
    assert total(both, "cuda:0") == 2 * total(alone, "cuda:0") - tables
    shared = replace(alone, targets=("cuda:0",))
    assert plan_of(shared, "cuda:0")["embedding and LM head"] == 0, "the target's own"
    converted = replace(shared, target_dtype=torch.float32)
    assert plan_of(converted, "cuda:0")["embedding and LM head"] == tables
    rounded = plan_of(replace(alone, matmul="fp8"), "cuda:0")
    assert rounded["embedding and LM head"] + rounded["LM head in 8 bits"] == tables
    assert plan_of(shared, "cuda:0")["batches on their way"] == 0


def test_a_device_that_is_too_small_is_refused_with_what_would_help(original: RunSizes) -> None:
    needed = total(original, "cuda:6")
    with pytest.raises(DeviceMemoryError, match="cuda:6 needs") as caught:
        require_fit(original, {"cuda:6": int(0.7 * needed)})
    assert caught.value.exit_code == 11
    assert f"{needed / GIB:.1f} GiB" in caught.value.what
    recomputed = total(replace(original, checkpoint=True), "cuda:6") / GIB
    assert f"execution.activation_checkpointing = true -> {recomputed:.1f} GiB" in caught.value.hint
    halved = total(replace(original, token_budget=24576), "cuda:6") / GIB
    assert f"data.token_budget = 24576 -> {halved:.1f} GiB" in caught.value.hint
    assert "data.token_budget = 12288" not in caught.value.hint, "half was enough"
    assert "GPU of its own" not in caught.value.hint, "no target is there"


def test_moving_the_target_away_is_advised_where_it_shares_the_gpu(original: RunSizes) -> None:
    shared = replace(original, targets=("cuda:0",), drafters=("cuda:0",))
    apart = replace(shared, targets=("cuda:1",))
    with pytest.raises(DeviceMemoryError) as caught:
        require_fit(shared, {"cuda:0": total(apart, "cuda:0") + OUTSIDE_BYTES})
    expected = f"the target on a GPU of its own -> {total(apart, 'cuda:0') / GIB:.1f} GiB"
    assert expected in caught.value.hint


def test_what_would_not_be_enough_alone_says_so(original: RunSizes) -> None:
    weights = 14 * original.shape.num_parameters
    with pytest.raises(DeviceMemoryError) as caught:
        require_fit(original, {"cuda:7": weights})
    assert caught.value.hint.count("(not enough alone)") >= 4
    assert "data.token_budget = 12288" in caught.value.hint, "a larger cut is shown as well"


def test_between_fitting_and_not_a_run_goes_on_with_a_warning(original: RunSizes) -> None:
    needed = total(original, "cuda:6")
    assert require_fit(original, {"cuda:6": needed + OUTSIDE_BYTES}) == []
    (said,) = require_fit(original, {"cuda:6": needed})
    assert said.startswith("memory is tight: cuda:6 needs")


def gpus(monkeypatch: pytest.MonkeyPatch, *, free_gib: float, count: int = 2) -> None:
    """Let torch.cuda report *count* GPUs of one kind."""
    free, whole = int(free_gib * GIB), int(140 * GIB)
    facts = SimpleNamespace(total_memory=whole)
    for name, answer in {
        "device_count": lambda: count,
        "mem_get_info": lambda _device: (free, whole),
        "memory_reserved": lambda _device: 0,
        "get_device_capability": lambda _device: (9, 0),
        "get_device_name": lambda _device: "NVIDIA H200",
        "get_device_properties": lambda _device: facts,
        "can_device_access_peer": lambda _one, _other: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, free_gib=1e-4)
    monkeypatch.setattr(build, "load_targets", lambda *_: pytest.fail("loaded all the same"))
    config = tiny_config(place, target={"devices": ("cuda:0",)}, drafter={"devices": ("cuda:1",)})
    with pytest.raises(DeviceMemoryError, match=r"cuda:1 needs .* and has 0\.0 GiB"):
        run(config, tmp_path / "run")


@pytest.mark.parametrize("where", ["main", "worker"])
def test_running_out_all_the_same_brings_the_same_advice(
    place: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gpus(monkeypatch, free_gib=100)
    config = tiny_config(
        place,
        target={"devices": ("cuda:0",)},
        drafter={"devices": ("cuda:1",), "num_layers": 4},
    )
    out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 1 has 2 GiB.")
    told = DeviceMemoryError("worker drafter-0 ran out of device memory: GPU 1 has 2 GiB", hint="x")
    told.threads_left = True

    @advised(config, fused=True)
    def run_out() -> None:
        if where == "main":
            raise out
        raise told from out

    with pytest.raises(DeviceMemoryError, match="ran out of device memory") as caught:
        run_out()
    assert "execution.activation_checkpointing = true -> 0.0 GiB" in caught.value.hint
    assert caught.value.threads_left == (where == "worker")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_target_that_cannot_be_read_is_left_to_its_loading(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, free_gib=1e-4)
    config = tiny_config(
        place,
        target={"devices": ("cuda:0",), "model": str(tmp_path)},
        drafter={"devices": ("cpu",)},
    )
    (said,) = require_room(config, fused=True)
    assert "memory was not planned" in said
    assert "holds no config.json" in said


def test_the_advice_is_asked_for_around_the_whole_run() -> None:
    assert run_module.advised is advised


def test_a_forecast_takes_this_machine_s_gpus_if_it_has_all_that_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    config = load(CONFIGS / "original-6x2.toml").config
    gpus(monkeypatch, free_gib=100, count=8)
    assert forecast(config).memory == "this machine's GPUs"
    assert {fit.available_bytes for fit in forecast(config).fits} == {int(140 * GIB)}
    gpus(monkeypatch, free_gib=100, count=7)
    assert "an H200" in forecast(config).memory
    assert "95 GiB a GPU (--device-gib)" in forecast(config, device_gib=95).memory


def test_a_stated_gpu_is_what_auto_means_in_a_forecast(place: Path) -> None:
    config = tiny_config(place, target={"devices": ("auto",)}, drafter={"devices": ("auto",)})
    assert [plan.device for plan in forecast(config).plans] == ["cpu"]
    assert forecast(config).fits == []
    assert [plan.device for plan in forecast(config, device_gib=1).plans] == ["cuda:0"]
