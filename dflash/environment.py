"""The machine and the software: what ``dflash env`` shows and a run keeps beside its records.

Looks, never touches: NVML answers without a CUDA context, versions come from package metadata,
and torch is asked only where it is imported already or *with_torch* says so.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata, util
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from dflash import __version__
from dflash.nvml import Gpu, gpu_report
from dflash.readable import readable_facts

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "typer", "rich", "triton")
EXTRAS = {"gguf": "gguf", "parquet": "pyarrow", "tensorboard": "tensorboard"}


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)

    _readable = model_validator(mode="before")(readable_facts)


class Feature(_Facts):
    """Something that may be there or not, and why it is not."""

    name: str
    available: bool
    why: str = ""


class Environment(_Facts):
    """Versions, processors, GPUs and what they make possible.

    ``gpus`` are all that the driver lists; ``cuda_visible_devices`` is the variable that may hide
    some of them from CUDA, None where it is not set.
    """

    dflash: str
    python: str
    platform: str
    cpu_cores: int
    memory_gib: float | None
    packages: dict[str, str | None]
    cuda_build: str | None = None
    driver: str | None = None
    gpus: list[Gpu] = []
    links: list[list[str]] = []
    cuda_visible_devices: str | None = None
    gpus_unknown_because: str = ""
    features: list[Feature] = []


def gpus_text(found: Environment, gpus: Iterable[str]) -> str:
    """*gpus* on one line, with the variable that may hide some of them where it is set."""
    listed = ", ".join(gpus) or found.gpus_unknown_because or "no GPU"
    visible = found.cuda_visible_devices
    return listed if visible is None else f"{listed} (CUDA_VISIBLE_DEVICES={visible})"


def environment(*, with_torch: bool = True) -> Environment:
    """Look at this machine. Never fails for want of a GPU, of NVML or of torch."""
    found = gpu_report()
    torch = _torch(wanted=with_torch)
    return Environment(
        dflash=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        packages={name: _version(name) for name in PACKAGES},
        cuda_build=None if torch is None else torch.version.cuda,
        driver=found.driver,
        gpus=found.gpus,
        links=found.links,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus_unknown_because=found.unknown_because,
        features=_features(torch),
    )


def _features(torch: Any) -> list[Feature]:  # noqa: ANN401 - a module that may be absent
    compilers = [name for name in ("g++", "clang++", "cl") if shutil.which(name)]
    why = "" if compilers else "no g++ or clang++ on the PATH"
    features = [_cuda_feature(torch), Feature(name="compile on CPU", available=not why, why=why)]
    for extra, module in EXTRAS.items():
        there = util.find_spec(module) is not None
        why = "" if there else f"pip install 'dflash-trainer[{extra}]'"
        features.append(Feature(name=f"extra {extra}", available=there, why=why))
    return features


def _cuda_feature(torch: Any) -> Feature:  # noqa: ANN401 - a module that may be absent
    if torch is None:
        return Feature(name="training on CUDA", available=False, why="torch is not installed")
    if torch.version.cuda is None:
        why = "this torch is built without CUDA"
    elif not torch.cuda.is_available():
        why = "torch finds no usable GPU or driver"
    else:
        why = ""
    return Feature(name="training on CUDA", available=not why, why=why)


def _torch(*, wanted: bool) -> Any:  # noqa: ANN401 - a module that may be absent
    if wanted and util.find_spec("torch") is not None:
        import torch  # noqa: F401 - seconds, and paid only by those who ask
    return sys.modules.get("torch")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
