"""The buffers that travel: a batch's inputs on the drafter's device, allocated once."""

from dataclasses import dataclass, field

import torch

from dflash.data.batch import PackedBatch
from dflash.drafter.training import StepInputs


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What the host needs to know of a batch after its tensors have gone to a device."""

    number: int
    num_real_tokens: int
    num_supervised_tokens: int
    num_documents: int
    rows: tuple[int, ...]


@dataclass(slots=True)
class FeatureSlot:
    """One batch's step inputs on a drafter's device.

    ``ready`` is recorded when the inputs are written, ``free`` when they have been copied to where
    the step reads them; both are None on a CPU, where the ring's order alone is enough.
    """

    inputs: StepInputs
    facts: BatchFacts | None = None
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None
    copy_stream: torch.cuda.Stream | None = None


@dataclass(slots=True)
class HostSlot:
    """One batch in host memory, pinned when a target is on a CUDA device."""

    batch: PackedBatch | None = None
    copied: torch.cuda.Event | None = field(default=None)


def feature_slots(
    count: int, *, token_budget: int, features_width: int, device: torch.device, dtype: torch.dtype
) -> list[FeatureSlot]:
    """Allocate *count* slots of *token_budget* positions."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return [
        FeatureSlot(
            inputs=StepInputs.allocate(token_budget, features_width, device=device, dtype=dtype),
            ready=torch.cuda.Event() if stream else None,
            free=torch.cuda.Event() if stream else None,
            copy_stream=stream,
        )
        for _ in range(count)
    ]


def slot_bytes(*, token_budget: int, features_width: int, dtype: torch.dtype) -> int:
    """Device bytes of one feature slot, or of the step's own copy of one."""
    return token_budget * (features_width * dtype.itemsize + 3 * 8 + 1) + 8
