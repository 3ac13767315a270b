"""The devices of a run: that they are there, can hold equal replicas, and reach each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal, NamedTuple

import torch

from dflash.config import RunConfig, resolved_devices, resolved_dtype
from dflash.drafter import fp8
from dflash.drafter.attention import FLEX_HEAD_DIM
from dflash.errors import ConfigError
from dflash.execution import ModeChoice, choose_mode
from dflash.train.memory import DTYPES, GIB

VISIBLE = "CUDA_VISIBLE_DEVICES"
FP8_CAPABILITY = (8, 9)  # torch._scaled_mm's own requirement
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class SumChoice(NamedTuple):
    """How gradients are summed over drafters and, in one sentence, why."""

    kind: Literal["none", "nccl", "fixed_order"]
    why: str
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class Devices:
    """Where everything runs, in which mode and precision, and what is to be said about it."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    mode: ModeChoice
    target_dtype: torch.dtype
    compute_dtype: torch.dtype
    gradient_sum: SumChoice
    notes: tuple[str, ...] = ()

    @property
    def num_cpu_workers(self) -> int:
        """Workers of both sides that compute on the CPU."""
        return (*self.targets, *self.drafters).count("cpu")


class Refusal(NamedTuple):
    """One thing that *key* asks for and that devices cannot do; *is_absent* where the only reason
    is that a device which it names is not on this machine."""

    key: str
    error: ConfigError
    is_absent: bool = False


def refusals(config: RunConfig) -> list[Refusal]:
    """Everything for which a run is refused by its configuration and this machine's devices alone.

    Of a device that is not here only what holds on any machine is judged.
    """
    num_cuda = torch.cuda.device_count()
    targets = resolved_devices(config.target.devices, num_cuda=num_cuda)
    drafters = resolved_devices(config.drafter.devices, num_cuda=num_cuda)
    here = [name for name in drafters if not _is_absent(name, num_cuda)]
    checks: list[tuple[str, Callable[[], object]]] = [
        ("drafter.devices", partial(_require_one_kind, drafters)),
        ("drafter.devices", partial(_require_one_architecture, here)),
        ("execution.mode", partial(_mode_of, config, drafters)),
    ]
    if config.precision.matmul != "bf16":
        checks.append(("precision.matmul", partial(_require_8bit_products, here)))
        width = config.drafter.intermediate_size
        widths = {} if width is None else {"drafter.intermediate_size": width}
        checks.append(("precision.matmul", partial(fp8.require_multiples, widths)))
    if here == list(drafters):
        nccl = partial(choose_sum, config.execution.gradient_sum, drafters)
        checks.append(("execution.gradient_sum", nccl))
    if config.drafter.head_dim is not None:
        heads = partial(require_wide_heads, config.drafter.head_dim, drafters)
        checks.append(("drafter.head_dim", heads))
    found = list(_absent(targets, drafters, num_cuda=num_cuda))
    for key, check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(Refusal(key, error))
    return found


def settle_devices(config: RunConfig) -> Devices:
    """Resolve devices, dtypes and the execution mode, and check that the devices exist.

    Raises:
        ConfigError: what ``refusals`` finds, all of it.
    """
    errors = [refusal.error for refusal in refusals(config)]
    if len(errors) > 1:
        lines = "".join(f"\n  - {error.what} ({error.hint})" for error in errors)
        raise ConfigError(f"the configuration has {len(errors)} problems here:{lines}")
    if errors:
        raise errors[0]
    num_cuda = torch.cuda.device_count()
    targets = resolved_devices(config.target.devices, num_cuda=num_cuda)
    drafters = resolved_devices(config.drafter.devices, num_cuda=num_cuda)
    return Devices(
        targets=targets,
        drafters=drafters,
        mode=_mode_of(config, drafters),
        target_dtype=DTYPES[resolved_dtype(config.target.dtype, devices=targets)],
        compute_dtype=DTYPES[resolved_dtype(config.precision.compute, devices=drafters)],
        gradient_sum=choose_sum(config.execution.gradient_sum, drafters),
        notes=(*_unequal_memory(drafters), *_detours(targets, drafters)),
    )


def require_wide_heads(head_dim: int, drafters: Sequence[str]) -> None:
    """Check that attention can have heads of this width on these devices.

    Raises:
        ConfigError: it cannot.
    """
    if head_dim < FLEX_HEAD_DIM and any(name != "cpu" for name in drafters):
        raise ConfigError(
            f"drafter.head_dim = {head_dim}: attention on a CUDA device needs heads of at"
            f" least {FLEX_HEAD_DIM}",
            hint=f"set drafter.head_dim = {FLEX_HEAD_DIM}; its default is the target's",
        )


def _mode_of(config: RunConfig, drafters: Sequence[str]) -> ModeChoice:
    return choose_mode(
        config.execution.mode,
        drafters,
        accumulates=config.optim.accumulate_steps > 1,
        allow_unsafe=config.execution.allow_unsafe,
    )


def _require_8bit_products(drafters: Sequence[str]) -> None:
    for name in drafters:
        capability = torch.cuda.get_device_capability(name) if name != "cpu" else None
        if capability is None or capability < FP8_CAPABILITY:
            kind = "has none" if capability is None else "has {}.{}".format(*capability)
            raise ConfigError(
                "precision.matmul in 8 bits needs a GPU of compute capability"
                f" {'.'.join(map(str, FP8_CAPABILITY))} or more for every drafter; {name} {kind}",
                hint='set precision.matmul = "bf16"',
            )


def choose_sum(
    requested: Literal["auto", "nccl", "fixed_order"], drafters: Sequence[str]
) -> SumChoice:
    """Settle how the gradients of drafters on these devices are summed.

    Raises:
        ConfigError: NCCL is asked for where it cannot run.
    """
    if len(drafters) == 1:
        return SumChoice("none", "there is one drafter")
    if requested == "fixed_order":
        return SumChoice("fixed_order", "asked for by execution.gradient_sum")
    obstacle = _obstacle_to_nccl(drafters)
    if obstacle and requested == "nccl":
        raise ConfigError(
            f'execution.gradient_sum = "nccl" with drafter.devices = {list(drafters)}: {obstacle}',
            hint='"auto" takes NCCL wherever it can run',
        )
    if obstacle:
        return SumChoice("fixed_order", obstacle)
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    why = f"every drafter has a GPU of its own and all are peers; NCCL {version}"
    return SumChoice("nccl", why, is_asked_for=requested == "nccl")


def are_peers(one: str, other: str) -> bool:
    """Whether two different CUDA devices read each other's memory without the host."""
    return torch.cuda.can_device_access_peer(one, other)


def _obstacle_to_nccl(drafters: Sequence[str]) -> str:
    if "cpu" in drafters:
        return "drafters run on the CPU"
    if len(set(drafters)) < len(drafters):
        return "two drafters share a GPU, and NCCL wants one for each"
    if not hasattr(torch._C, "_nccl_all_reduce"):  # noqa: SLF001 - what torch.cuda.nccl itself asks
        return "this torch was built without NCCL"
    for one, other in combinations(drafters, 2):
        if not are_peers(one, other):
            return f"{one} and {other} are not peers"
    settings = " ".join(os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    if "expandable_segments:True" in settings and os.environ.get("NCCL_P2P_DIRECT_DISABLE") != "1":
        return (
            "expandable_segments:True maps memory for its own GPU alone, and NCCL within one"
            " process reads its neighbours' directly unless NCCL_P2P_DIRECT_DISABLE=1 is set"
        )
    return ""


def _is_absent(name: str, num_cuda: int) -> bool:
    return name.startswith("cuda:") and int(name.removeprefix("cuda:")) >= num_cuda


def _absent(targets: Sequence[str], drafters: Sequence[str], *, num_cuda: int) -> Iterator[Refusal]:
    missing = [
        (key, f"{key}: there is no device {name}")
        for key, names in (("target.devices", targets), ("drafter.devices", drafters))
        for name in names
        if _is_absent(name, num_cuda)
    ]
    if not missing:
        return
    visible = os.environ.get(VISIBLE)
    limited = "" if visible is None else f", since {VISIBLE} is {visible!r}"
    error = ConfigError(
        f"{'; '.join(text for _, text in missing)}; this process sees {_count(num_cuda)}{limited}",
        hint=f"unset {VISIBLE} or name more GPUs in it; what it lists is numbered from cuda:0 on"
        if visible is not None
        else '`dflash env` lists them; "cpu" is a device too',
    )
    yield Refusal(missing[0][0], error, is_absent=True)


def _require_one_kind(drafters: Sequence[str]) -> None:
    if len({name.partition(":")[0] for name in drafters}) > 1:
        raise ConfigError(
            f"drafter.devices = {list(drafters)}: replicas must all be on CUDA devices or all on"
            " the CPU, since the two round differently and the replicas would drift apart",
            hint="name devices of one kind",
        )


def _require_one_architecture(drafters: Sequence[str]) -> None:
    gpus = [name for name in dict.fromkeys(drafters) if name != "cpu"]
    kinds = {name: torch.cuda.get_device_capability(name) for name in gpus if len(gpus) > 1}
    if len(set(kinds.values())) > 1:
        shown = ", ".join(
            f"{name} is a {torch.cuda.get_device_name(name)} of compute capability {a}.{b}"
            for name, (a, b) in kinds.items()
        )
        raise ConfigError(
            f"drafter.devices = {list(drafters)}: {shown}; replicas must round alike to stay equal,"
            " and kernels for different architectures do not",
            hint="give the drafters GPUs of one kind, and the others to the target",
        )


def _unequal_memory(drafters: Sequence[str]) -> Iterator[str]:
    gpus = [name for name in dict.fromkeys(drafters) if name != "cpu"]
    if len(gpus) < 2:  # noqa: PLR2004 - it takes two to differ
        return
    found = {name: (torch.cuda.get_device_name(name), _total_gib(name)) for name in gpus}
    if len(set(found.values())) > 1:
        shown = ", ".join(
            f"{name} {kind} with {gib:.0f} GiB" for name, (kind, gib) in found.items()
        )
        yield (
            f"the drafters' GPUs differ ({shown}): every step waits for the slowest, and data"
            ".token_budget must fit the smallest"
        )


def _total_gib(name: str) -> float:
    return round(torch.cuda.get_device_properties(name).total_memory / GIB)


def _detours(targets: Sequence[str], drafters: Sequence[str]) -> Iterator[str]:
    pairs = dict.fromkeys((target, drafter) for target in targets for drafter in drafters)
    for target, drafter in pairs:
        both = target != "cpu" and drafter != "cpu"
        if target != drafter and both and not are_peers(target, drafter):
            yield (
                f"features go from {target} to {drafter} through host memory, since the two are"
                " not peers; `dflash env` shows how GPUs are joined"
            )


def _count(num_cuda: int) -> str:
    return f"{num_cuda or 'no'} CUDA device{'' if num_cuda == 1 else 's'}"
