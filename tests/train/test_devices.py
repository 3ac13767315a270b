"""Devices are judged before anything is loaded: existence, likeness, and who reaches whom."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import events_of, run, tiny_config

from dflash.errors import ConfigError
from dflash.train.devices import choose_sum, settle_devices

Machine = Callable[..., None]
H200 = ("NVIDIA H200", (9, 0), 140)
BLACKWELL = ("NVIDIA RTX PRO 6000", (12, 0), 95)
NCCL = "_nccl_all_reduce"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make torch.cuda report the GPUs given, and *peers* about any two of them."""

    def number(device: object) -> int:
        return int(str(device).removeprefix("cuda:"))

    def report(*gpus: tuple[str, tuple[int, int], int], peers: bool = True) -> None:
        for name, answer in {
            "device_count": lambda: len(gpus),
            "get_device_name": lambda device: gpus[number(device)][0],
            "get_device_capability": lambda device: gpus[number(device)][1],
            "get_device_properties": lambda device: SimpleNamespace(
                total_memory=gpus[number(device)][2] * 2**30
            ),
            "can_device_access_peer": lambda _one, _other: peers,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, NCCL, lambda: None, raising=False)  # noqa: SLF001
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return report


def on(place: Path, targets: tuple[str, ...], drafters: tuple[str, ...], **execution: str) -> Any:  # noqa: ANN401
    return tiny_config(
        place,
        target={"devices": targets},
        drafter={"devices": drafters},
        execution={"mode": "eager", **execution},
    )


@pytest.mark.parametrize(
    ("visible", "says", "hint"),
    [
        ("5", "this process sees 1 CUDA device, since CUDA_VISIBLE_DEVICES is '5'", "unset CUDA"),
        (None, "this process sees 1 CUDA device", "`dflash env` lists them"),
    ],
)
def test_a_second_gpu_that_is_not_visible_is_explained(  # noqa: PLR0917
    place: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    says: str,
    hint: str,
) -> None:
    machine(H200)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as caught:
        settle_devices(on(place, ("cuda:0",), ("cuda:0", "cuda:1")))
    assert caught.value.what == f"drafter.devices: there is no device cuda:1; {says}"
    assert caught.value.hint.startswith(hint)
    assert caught.value.exit_code == 2


def test_a_gpu_that_is_hidden_by_an_empty_list_is_explained(
    place: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="sees no CUDA devices, since CUDA_VISIBLE_DEVICES is ''"):
        settle_devices(on(place, ("cuda:0",), ("cpu",)))


def test_all_that_devices_cannot_do_is_refused_at_once(place: Path, machine: Machine) -> None:
    machine(("NVIDIA A100", (8, 0), 80))
    config = tiny_config(
        place,
        target={"devices": ("cuda:3",)},
        drafter={"devices": ("cuda:0", "cuda:0"), "head_dim": 8},
        execution={"mode": "warmed", "gradient_sum": "nccl"},
        precision={"matmul": "fp8"},
    )
    with pytest.raises(ConfigError) as caught:
        settle_devices(config)
    first, *lines = caught.value.what.splitlines()
    assert first == "the configuration has 5 problems here:"
    assert [line[:31] for line in lines] == [
        "  - target.devices: there is no",
        "  - execution.mode = 'warmed' w",
        "  - precision.matmul in 8 bits ",
        '  - execution.gradient_sum = "n',
        "  - drafter.head_dim = 8: atten",
    ]


def test_drafters_of_different_architectures_are_refused(place: Path, machine: Machine) -> None:
    machine(H200, BLACKWELL)
    with pytest.raises(ConfigError, match="replicas must round alike") as caught:
        settle_devices(on(place, ("cuda:0",), ("cuda:0", "cuda:1")))
    assert "cuda:0 is a NVIDIA H200 of compute capability 9.0" in caught.value.what
    assert "cuda:1 is a NVIDIA RTX PRO 6000 of compute capability 12.0" in caught.value.what
    assert settle_devices(on(place, ("cuda:0",), ("cuda:1",))).notes == (), "the target may differ"


def test_drafters_with_unequal_memory_are_warned_of(place: Path, machine: Machine) -> None:
    machine(("NVIDIA A100", (8, 0), 80), ("NVIDIA A100", (8, 0), 40))
    (note,) = settle_devices(on(place, ("cuda:0",), ("cuda:0", "cuda:1"))).notes
    assert "cuda:0 NVIDIA A100 with 80 GiB, cuda:1 NVIDIA A100 with 40 GiB" in note
    assert "must fit the smallest" in note


def test_a_way_through_host_memory_is_told(place: Path, machine: Machine) -> None:
    machine(H200, H200, peers=False)
    settled = settle_devices(on(place, ("cuda:0", "cpu"), ("cuda:0", "cuda:1")))
    (note,) = settled.notes
    assert note.startswith("features go from cuda:0 to cuda:1 through host memory")
    assert settled.gradient_sum[:2] == ("fixed_order", "cuda:0 and cuda:1 are not peers")
    machine(H200, H200)
    assert settle_devices(on(place, ("cuda:0",), ("cuda:1",))).notes == ()


@pytest.mark.parametrize(
    ("drafters", "kind", "why"),
    [
        (["cuda:0"], "none", "there is one drafter"),
        (["cpu", "cpu"], "fixed_order", "drafters run on the CPU"),
        (["cuda:0", "cuda:0"], "fixed_order", "two drafters share a GPU"),
        (["cuda:0", "cuda:1"], "nccl", "all are peers; NCCL 2.28.3"),
    ],
    ids=str,
)
def test_nccl_is_taken_where_it_can_run_and_the_choice_says_why(
    machine: Machine, *, drafters: list[str], kind: str, why: str
) -> None:
    machine(H200, H200)
    choice = choose_sum("auto", drafters)
    assert choice.kind == kind
    assert why in choice.why
    if kind == "fixed_order":
        with pytest.raises(ConfigError, match=r'execution.gradient_sum = "nccl"'):
            choose_sum("nccl", drafters)


def test_the_fixed_order_can_be_asked_for(machine: Machine) -> None:
    machine(H200, H200)
    assert choose_sum("fixed_order", ["cuda:0", "cuda:1"]).kind == "fixed_order"


def test_a_torch_without_nccl_sums_in_a_fixed_order(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(H200, H200)
    monkeypatch.delattr(torch._C, NCCL)  # noqa: SLF001
    choice = choose_sum("auto", ["cuda:0", "cuda:1"])
    assert choice[:2] == ("fixed_order", "this torch was built without NCCL")


def test_memory_that_neighbours_cannot_read_is_not_given_to_nccl(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(H200, H200)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert choose_sum("auto", ["cuda:0", "cuda:1"]).kind == "fixed_order"
    monkeypatch.setenv("NCCL_P2P_DIRECT_DISABLE", "1")
    assert choose_sum("auto", ["cuda:0", "cuda:1"]).kind == "nccl"


def test_a_run_says_and_keeps_how_it_sums(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = tiny_config(place, drafter={"devices": ("cpu", "cpu")}, optim={"max_steps": 2})
    run(config, tmp_path / "run", say=said.append)
    assert "gradients are summed by fixed_order: drafters run on the CPU" in said
    kept = (tmp_path / "run" / "environment.json").read_text()
    assert '"gradient_sum": "fixed_order"' in kept
    assert '"gradient_sum_why": "drafters run on the CPU"' in kept
    assert events_of(tmp_path / "run", "warm_up")
