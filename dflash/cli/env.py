"""``dflash env``: versions, GPUs, how they are joined, and what is available."""

from typing import Annotated

import typer

from dflash.cli.output import print_json, print_table
from dflash.environment import Environment, environment


def env(
    *, as_json: Annotated[bool, typer.Option("--json", help="print one JSON value")] = False
) -> None:
    """Show versions, GPUs and what is available. Needs neither a GPU nor a driver."""
    found = environment()
    if as_json:
        print_json(found.model_dump())
        return
    print_table(("software", "version"), _software(found))
    print()
    if found.gpus:
        print_table(("GPU", "name", "memory", "in use", "capability"), _gpus(found))
    else:
        print(f"no GPU: {found.gpus_unknown_because or 'the driver lists none'}")
    if found.cuda_visible_devices is not None:
        print(f"CUDA_VISIBLE_DEVICES={found.cuda_visible_devices}: CUDA sees no other GPU")
    if found.links:
        print()
        heads = [f"GPU {index}" for index in range(len(found.links))]
        rows = [(head, *row) for head, row in zip(heads, found.links, strict=True)]
        print_table(("", *heads), rows)
    print()
    print_table(("feature", "available", "why not"), _features(found))


def _software(found: Environment) -> list[tuple[str, str]]:
    memory = "" if found.memory_gib is None else f", {found.memory_gib:g} GiB"
    return [
        ("dflash", found.dflash),
        ("python", found.python),
        ("platform", found.platform),
        ("cpu", f"{found.cpu_cores} cores{memory}"),
        *((name, version or "not installed") for name, version in found.packages.items()),
        ("torch's CUDA", found.cuda_build or "none"),
        ("NVIDIA driver", found.driver or "none"),
    ]


def _gpus(found: Environment) -> list[tuple[str, ...]]:
    return [
        (
            str(gpu.index),
            gpu.name,
            f"{gpu.memory_gib:g} GiB",
            f"{gpu.used_gib:g} GiB",
            gpu.compute_capability,
        )
        for gpu in found.gpus
    ]


def _features(found: Environment) -> list[tuple[str, str, str]]:
    return [(each.name, "yes" if each.available else "no", each.why) for each in found.features]
