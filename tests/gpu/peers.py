"""What a thread may call while another one captures, by the error mode of the capture.

``python tests/gpu/peers.py`` prints a table; every cell is a forked process, since whatever breaks
a capture may spoil the process. Half a minute on an H200.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

MODES = ("global", "thread_local", "relaxed")
WAIT_S = 20.0
MALLOC_BYTES = 1 << 30  # more than the allocator has in its cache


@dataclass(frozen=True)
class Peer:
    """What the other thread works with."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    x: torch.Tensor
    host: torch.Tensor
    pinned: torch.Tensor


CALLS: dict[str, Callable[[Peer], Any]] = {
    "nothing": lambda _: None,
    "a kernel": lambda peer: peer.x.add_(1),
    "cudaMalloc": lambda _: torch.empty(MALLOC_BYTES, dtype=torch.uint8, device="cuda"),
    "empty_cache": lambda _: torch.cuda.empty_cache(),
    "pin_memory": lambda _: torch.ones(1 << 22).pin_memory(),
    "event.query": lambda peer: peer.event.query(),
    "event.synchronize": lambda peer: peer.event.synchronize(),
    "stream.synchronize": lambda peer: peer.stream.synchronize(),
    "cuda.synchronize": lambda _: torch.cuda.synchronize(),
    "item": lambda peer: peer.x.sum().item(),
    "copy from pageable memory": lambda peer: peer.x.copy_(peer.host),
    "copy from pinned memory": lambda peer: peer.x.copy_(peer.pinned, non_blocking=True),
    "torch.rand": lambda _: torch.rand(1024, device="cuda"),
    "mem_get_info": lambda _: torch.cuda.mem_get_info(),
}


def who_dies(call: str, mode: str) -> list[str]:
    """Make *call* in one thread while another captures in *mode*; needs a process of its own."""
    opened, done, dead = threading.Event(), threading.Event(), []
    stream, y, host = torch.cuda.Stream(), torch.ones(1024, device="cuda"), torch.ones(1024)
    peer = Peer(
        torch.cuda.Stream(),
        torch.cuda.Event(),
        torch.ones(1024, device="cuda"),
        host,
        host.pin_memory(),
    )
    with torch.cuda.stream(peer.stream):  # kernels and generator are there before
        peer.x.sum().item()
        torch.rand(1024, device="cuda")
        torch.empty(MALLOC_BYTES >> 2, dtype=torch.uint8, device="cuda")
        peer.event.record()
    with torch.cuda.stream(stream):
        y.add_(1).mul_(0.5)
    torch.cuda.synchronize()

    def capturing() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            try:
                y.add_(1)
                opened.set()
                done.wait(WAIT_S)
                y.mul_(0.5)
            finally:
                graph.capture_end()
        graph.replay()
        stream.synchronize()

    def other() -> None:
        opened.wait(WAIT_S)
        with torch.cuda.stream(peer.stream):
            CALLS[call](peer)

    def watched(name: str, body: Callable[[], None], over: threading.Event) -> None:
        try:
            body()
        except Exception:  # noqa: BLE001 - whatever it is, the thread is dead
            dead.append(name)
        finally:
            over.set()

    threads = [
        threading.Thread(target=watched, args=("capture", capturing, opened), daemon=True),
        threading.Thread(target=watched, args=("peer", other, done), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    return sorted(dead) + ["hang"] * any(thread.is_alive() for thread in threads)


def in_a_process(call: str, mode: str) -> list[str]:
    """The same in a fork of this process, which must not have used CUDA."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = who_dies(call, mode)
        except BaseException as error:  # noqa: BLE001
            answer = [f"setup: {error!r}"]
        os.write(into, json.dumps(answer).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(text) if text else ["the process died"]
    return found


def main() -> None:
    """Print a table for people, or with ``--json`` one JSON object."""
    found = {f"{c} | {m}": in_a_process(c, m) for c, m in product(CALLS, MODES)}
    if sys.argv[1:] == ["--json"]:
        sys.stdout.write(json.dumps(found))
        return
    lines = [f"torch {torch.__version__}", ""]
    lines += [f"| call | {' | '.join(MODES)} |", "|---|---|---|---|"]
    for call in CALLS:
        dead = [", ".join(found[f"{call} | {mode}"]) or "none" for mode in MODES]
        lines.append(f"| {call} | {' | '.join(dead)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
