"""Memory of torch.compile(mode="reduce-overhead") by number of threads, and over forty lengths.

    python threads_memory.py              # every measurement, each in a process of its own
    python threads_memory.py ended 4      # one of them

Needs nothing but torch and one CUDA GPU with 4 GiB free; two minutes, without the slow ones.
Forward and backward of four layers of 4096 in bf16, 8192 rows. Each measurement is a JSON line:
GiB reserved now and at most, and device allocations (cudaMalloc) since the process began.

    ended N      N threads, each started when the one before has ended, share one compiled module
    alive N      the same, but none ends before the last is done
    plain L      L lengths, 8192 rows and ever 176 fewer, dynamic=True
    skip L       the same with cudagraph_skip_dynamic_graphs
    sizes L      the same with cudagraph_capture_sizes of 1024, 2048, .. 8192
    static L     the same lengths, dynamic=False: every length is compiled
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch import Tensor, nn

ALL = (("ended", 1), ("ended", 4), ("alive", 4), ("plain", 40), ("skip", 40), ("sizes", 40))
ROWS, WIDTH, NUM_LAYERS, FEWER = 8192, 4096, 4, 176
THREAD_STEPS, LENGTH_STEPS = 4, 3  # warm-up, capture and replay are in the first three
TOLD_EVERY = 13  # lengths
POLL_S = 0.01
GIB = 2**30

Call = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Residual layers, and a scalar to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x)) + x
        return x.float().square().mean()


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)


def steps(net: Net, call: Call, x: Tensor, *, times: int) -> None:
    """Forward and backward of one batch, without a move of the weights."""
    for _ in range(times):
        torch.compiler.cudagraph_mark_step_begin()
        call(x).backward()
        net.zero_grad()
    torch.cuda.synchronize()


def memory() -> dict[str, float]:
    """What the allocator holds."""
    stats = torch.cuda.memory_stats()
    return {
        "reserved_gib": round(stats["reserved_bytes.all.current"] / GIB, 3),
        "peak_gib": round(stats["reserved_bytes.all.peak"] / GIB, 3),
        "device_allocs": stats["num_device_alloc"],
    }


def by_threads(number: int, *, alive: bool) -> Iterator[dict[str, float]]:
    """Yield the memory after each of *number* threads has trained."""
    net = Net().cuda().bfloat16()
    compiled = torch.compile(net, mode="reduce-overhead", dynamic=False)
    x, over = batch(ROWS), threading.Event()

    def work(trained: threading.Event) -> None:
        steps(net, compiled, x, times=THREAD_STEPS)
        trained.set()
        if alive:
            over.wait()

    try:
        for index in range(number):
            trained = threading.Event()
            thread = threading.Thread(target=work, args=(trained,))
            thread.start()
            while thread.is_alive() and not (alive and trained.is_set()):
                thread.join(POLL_S)
            if not trained.is_set():
                raise SystemExit(f"thread {index + 1} died")
            yield {"thread": index + 1, **memory()}
    finally:
        over.set()


def by_lengths(number: int, *, kind: str) -> Iterator[dict[str, float]]:
    """Yield the memory after the first, every 13th and the last of *number* lengths."""
    net = Net().cuda().bfloat16()
    if kind == "skip":
        inductor.triton.cudagraph_skip_dynamic_graphs = True
    if kind == "sizes":
        inductor.triton.cudagraph_capture_sizes = tuple(range(1024, ROWS + 1, 1024))
    dynamo.recompile_limit = 64
    compiled = torch.compile(net, mode="reduce-overhead", dynamic=kind != "static")
    begun_s = time.monotonic()
    for index in range(number):
        steps(net, compiled, batch(ROWS - FEWER * index), times=LENGTH_STEPS)
        if index % TOLD_EVERY == 0 or index == number - 1:
            yield {"length": index + 1, "s": round(time.monotonic() - begun_s, 1), **memory()}


def main() -> None:
    """Measure what was asked for, or all in processes of their own."""
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA GPU: nothing was run")
    if sys.argv[1:]:
        kind, number = sys.argv[1], int(sys.argv[2])
        threaded = kind in ("ended", "alive")
        measured = (
            by_threads(number, alive=kind == "alive") if threaded else by_lengths(number, kind=kind)
        )
        for line in measured:
            print(json.dumps({"what": kind, **line}), flush=True)
        return
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for kind, number in ALL:
        subprocess.run([sys.executable, __file__, kind, str(number)], check=False)  # noqa: S603


if __name__ == "__main__":
    main()
