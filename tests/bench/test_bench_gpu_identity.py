"""A bench watches and names the GPU that CUDA means by "cuda:N", or says that it cannot tell."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_nvml import FakeNvml
from bench_subjects import Sound

from dflash_bench import visible_gpus
from dflash_bench.own_process import Numbered
from dflash_bench.part import Part
from dflash_bench.session import BenchPlan, run_bench
from dflash_bench.shapes import named_shape
from dflash_bench.weather import Watch

VISIBLE, ORDER = visible_gpus.VISIBLE, visible_gpus.ORDER
L4, H200 = FakeNvml().names
PLAN = BenchPlan(shapes=(named_shape("tiny"),))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """An L4 on the first bus, an H200 on the second, and nobody to ask how CUDA counts them."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    asked_by(monkeypatch, unasked)
    visible_gpus.as_cuda_counts.cache_clear()
    for name in (VISIBLE, ORDER):
        monkeypatch.delenv(name, raising=False)
    return fake


def asked_by(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Let *run* stand in for ``subprocess.run``, of this module only."""
    stand_in = SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr(visible_gpus, "subprocess", stand_in)


def unasked(*_: object, **_more: object) -> None:
    raise AssertionError("CUDA was asked")


def answering(*uuids: str) -> tuple[list[object], Callable[..., object]]:
    """Calls so far, and a ``subprocess.run`` whose process prints *uuids* as torch does."""
    calls: list[object] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(stdout="".join(f"{uuid.removeprefix('GPU-')}\n" for uuid in uuids))

    return calls, run


@pytest.mark.parametrize(
    ("visible", "device", "name"),
    [
        ("1", "cuda:0", H200),
        ("1,0", "cuda:1", L4),
        (" 1 , 0 ", "cuda:0", H200),
        (None, "cuda:1", H200),
        (None, "cuda", L4),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_by_bus_cuda_counts_as_nvml_does_among_the_visible_ones(
    monkeypatch: pytest.MonkeyPatch, *, visible: str | None, device: str, name: str
) -> None:
    monkeypatch.setenv(ORDER, "PCI_BUS_ID")
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    watch = Watch([device])
    assert watch.gpu_name(device) == name
    assert watch.weather(()).unknown_because == ""


@pytest.mark.parametrize("visible", ["GPU-8932f937", "GPU-8932f937-33", "GPU-8"])
@pytest.mark.usefixtures("nvml")
def test_the_beginning_of_a_uuid_is_enough(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    watch = Watch(["cuda:0"])
    assert watch.gpu_name("cuda:0") == H200
    assert watch.free_gib("cuda:0") == 21.0


@pytest.mark.parametrize("visible", ["GPU-", "GPU-77", "5", "", "1gpu", "GPU-8932f937 GPU-aaaa"])
@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_cannot_be_told_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setenv(ORDER, "PCI_BUS_ID")
    watch = Watch(["cuda:0"])
    assert (watch.gpu_name("cuda:0"), watch.free_gib("cuda:0")) == (None, None)
    assert "which GPU cuda:0 is cannot be told" in watch.weather(()).unknown_because


def test_gpus_of_one_model_are_counted_by_bus_whatever_the_order(nvml: FakeNvml) -> None:
    nvml.names = (H200, H200)
    assert Watch(["cuda:1"]).uuids == {"cuda:1": nvml.uuids[1]}


def test_where_models_differ_a_process_of_its_own_says_how_cuda_counts(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run = answering(*reversed(nvml.uuids))
    asked_by(monkeypatch, run)
    watch = Watch(["cuda:0", "cuda:1"])
    assert [watch.gpu_name(device) for device in ("cuda:0", "cuda:1")] == [H200, L4]
    assert calls == [[sys.executable, "-c", visible_gpus.ASK]]


@pytest.mark.usefixtures("nvml")
def test_where_that_process_fails_no_gpu_is_watched_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **_more: object) -> None:
        raise subprocess.CalledProcessError(1, "python")

    asked_by(monkeypatch, fail)
    watch = Watch(["cuda:0"])
    assert (watch.gpu_name("cuda:0"), watch.free_gib("cuda:0")) == (None, None)
    assert f"{ORDER}=PCI_BUS_ID" in watch.weather(()).unknown_because


def test_the_question_to_that_process_runs_and_knows_no_gpu_without_cuda() -> None:
    told = subprocess.run(
        [sys.executable, "-c", visible_gpus.ASK], capture_output=True, text=True, check=True
    )
    assert len(told.stdout.split()) == torch.cuda.device_count()


def test_a_part_of_a_gpu_is_watched_by_its_own_uuid_only(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.divided = True
    monkeypatch.setenv(ORDER, "PCI_BUS_ID")
    assert "MIG-... says which" in Watch(["cuda:0"]).weather(()).unknown_because
    nvml.names, nvml.uuids = (*nvml.names, "NVIDIA H200 MIG 1g.18gb"), (*nvml.uuids, "MIG-5")
    monkeypatch.setenv(VISIBLE, "MIG-5")
    assert Watch(["cuda:0"]).gpu_name("cuda:0") == "NVIDIA H200 MIG 1g.18gb"


def test_a_child_is_told_its_gpus_and_does_not_ask_again(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls, run = answering(*reversed(nvml.uuids))
    asked_by(monkeypatch, run)
    make = partial(Sound, "one", tmp_path / "log")
    told = Numbered(make, devices=("cuda:0",), uuids=Watch(("cuda:0", "cuda:1")).uuids)
    numbered = pickle.loads(pickle.dumps(told))  # noqa: S301 - ours
    visible_gpus.as_cuda_counts.cache_clear()
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, **_more: nvml.processes.update({1234: 2**30}))
    assert numbered().build()["gpu_process"] == 1234  # it runs on the H200, and is not NVML's first
    assert len(calls) == 1
    assert chosen == [torch.device("cuda", 0)]  # its thread's own, so that it opens no other


@pytest.fixture
def seen(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """GPUs that are sampled while a case is measured, of two that CUDA counts as NVML does."""
    assert nvml.names == (L4, H200)
    found: dict[str, set[str]] = {}

    def look(part: Part) -> None:
        part.watch.samples.clear()
        with part.watch.watching():
            time.sleep(0.1)
        found[part.case.name] = {sample.device for sample in part.watch.samples}

    monkeypatch.setenv(ORDER, "PCI_BUS_ID")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("dflash_bench.weather.EVERY_S", 0.001)
    monkeypatch.setattr(Part, "run", look)
    return found


def test_a_bench_is_named_after_the_gpu_that_its_cases_run_on(
    seen: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, cases=("decode",), devices=("cuda:0",), target_device="cuda:1")
    assert run_bench(plan, say=lambda _: None).device == H200
    assert seen == {"decode": {"cuda:1"}}
    monkeypatch.setenv(VISIBLE, "1,0")
    assert run_bench(plan, say=lambda _: None).device == L4


def test_while_a_case_is_measured_only_its_own_gpus_are_sampled(seen: dict[str, set[str]]) -> None:
    cases = ("mask", "decode", "packing", "drafter-step")
    plan = replace(PLAN, cases=cases, drafters=2, target_device="cuda:1")
    assert run_bench(plan, say=lambda _: None).device == L4
    assert seen == {
        "mask": {"cuda:0"},
        "decode": {"cuda:1"},
        "packing": set(),
        "drafter-step": {"cuda:0", "cuda:1"},
    }
