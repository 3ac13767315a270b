"""What a key that is absent or "auto" comes to, as pure functions of the facts it depends on."""

from collections.abc import Sequence
from typing import Literal

from dflash.config.sections import RunConfig

GAMMA_OF_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}  # arXiv 2602.06036 A.1


def resolved_gamma(config: RunConfig) -> float:
    """The decay length in slots: as set, else the paper's, else half the drafted slots."""
    if config.objective.gamma is not None:
        return config.objective.gamma
    block_size = config.drafter.block_size
    return GAMMA_OF_BLOCK_SIZE.get(block_size, (block_size - 1) / 2)


def resolved_devices(devices: Sequence[str], *, num_cuda: int) -> tuple[str, ...]:
    """Device names with ``auto`` replaced, on a machine with *num_cuda* GPUs."""
    if tuple(devices) == ("auto",):
        return ("cuda:0",) if num_cuda else ("cpu",)
    return tuple(devices)


def resolved_dtype(
    dtype: Literal["auto", "bf16", "fp32"], *, devices: Sequence[str]
) -> Literal["bf16", "fp32"]:
    """``auto`` is bf16 when every device is a GPU and fp32 otherwise."""
    if dtype != "auto":
        return dtype
    return "bf16" if all(device.startswith("cuda") for device in devices) else "fp32"
