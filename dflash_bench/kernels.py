"""Where the time of a step goes: kernels on the device by what they are for, and the gaps."""

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

GROUPS = (
    ("attention backward", r"flex_attention_backward|flash.*bwd|attention.*backward"),
    ("attention forward", r"flex_attention|flash|scaled_dot_product"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem_.*mm|^aten::\w*mm$"),
    (
        "optimizer",
        r"adam|multi_tensor|norm_kernel|NormTwo|vector_norm|triton_poi_.*(?<!r)sqrt.*where",
    ),
    ("LM-head kernels", r"softmax|triton_\w*(logsumexp|_exp_|expm1|amax|_mul_\w*scatter)"),
    ("anchors and mask", r"topk|sort|radix|scan|cumsum|gather|scatter|index|bitonic"),
    ("copies", r"memcpy|memset|CatArray|FillFunctor|direct_copy|^aten::(copy_|cat|fill_)"),
    ("elementwise", r"triton_|elementwise|reduce|vectorized|aten::"),
)
"""Name and pattern; the first pattern that a kernel's name holds decides."""

OTHER = "other"
MAX_LISTED = 40
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Kernel(NamedTuple):
    """One run of one kernel, in microseconds."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds a step, by group and by kernel; gaps are known on a GPU alone."""

    groups_ms: dict[str, float]
    kernels_ms: dict[str, float]
    launches: dict[str, float]
    gaps_ms: float | None
    num_steps: int

    @property
    def total_ms(self) -> float:
        return sum(self.groups_ms.values()) + (self.gaps_ms or 0.0)

    def text(self) -> str:
        """A table of groups, and one of the kernels that take most."""
        gaps = {} if self.gaps_ms is None else {"gaps": self.gaps_ms}
        ordered = sorted((self.groups_ms | gaps).items(), key=lambda item: -item[1])
        lines = [f"ms a step, over {self.num_steps} profiled steps", ""]
        lines += [f"{ms:9.3f}  {ms / self.total_ms:6.1%}  {name}" for name, ms in ordered]
        lines += [f"{self.total_ms:9.3f}          all", "", "       ms   share  runs  kernel"]
        kernels = sorted(self.kernels_ms.items(), key=lambda item: -item[1])[:MAX_LISTED]
        lines += [
            f"{ms:9.3f}  {ms / self.total_ms:6.1%}  {self.launches[name]:4.0f}  "
            f"[{group_of(name)}] {name}"
            for name, ms in kernels
        ]
        return "\n".join(lines) + "\n"


def group_of(kernel: str) -> str:
    """What a kernel is for, as far as its name tells."""
    for group, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return OTHER


def profile_steps(run: Callable[[int], object], *, count: int, device: torch.device) -> Profile:
    """Profile ``run(count)``, which makes so many steps in whatever thread; call from the main one.

    The profiler wants to be started first in the main thread (kineto says so on stderr, else).
    """
    on_gpu = device.type == "cuda"
    run(1)
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
        acc_events=True,  # torch 2.11 warns without it
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    ) as seen:
        run(count)
        if on_gpu:
            torch.cuda.synchronize(device)
    if on_gpu:
        return summary(_device_work(seen), num_steps=count, with_gaps=True)
    operators = [
        Kernel(event.name, 0.0, event.self_cpu_time_total)
        for event in seen.events() or ()
        if not event.is_user_annotation
    ]
    return summary(operators, num_steps=count, with_gaps=False)


def summary(kernels: Sequence[Kernel], *, num_steps: int, with_gaps: bool) -> Profile:
    """Add up *kernels* by group and by name."""
    groups, times = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel in kernels:
        groups[group_of(kernel.name)] += kernel.duration_us / 1e3 / num_steps
        times[kernel.name] += kernel.duration_us / 1e3 / num_steps
    runs = Counter(kernel.name for kernel in kernels)
    return Profile(
        groups_ms=dict(groups),
        kernels_ms=dict(times),
        launches={name: count / num_steps for name, count in runs.items()},
        gaps_ms=_gaps_us(kernels) / 1e3 / num_steps if with_gaps else None,
        num_steps=num_steps,
    )


def _gaps_us(kernels: Sequence[Kernel]) -> float:
    """Time from the first kernel's start to the last one's end in which none ran."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    gaps, reached = 0.0, ordered[0].start_us if ordered else 0.0
    for kernel in ordered:
        gaps += max(0.0, kernel.start_us - reached)
        reached = max(reached, kernel.start_us + kernel.duration_us)
    return gaps


def _device_work(seen: profile) -> list[Kernel]:
    """Kernels, copies and fills on the device; torch's own events mix annotations in."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in DEVICE_WORK and "dur" in event
    ]
