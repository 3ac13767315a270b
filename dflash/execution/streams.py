"""Current streams and devices, which belong to a thread and are cuda:0's where it chose none."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_device(device: torch.device) -> None:
    """Make a CUDA *device* the calling thread's own: where events, replays and captures are that
    name none. Does nothing for a CPU, nor for "cuda", which is that device already."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make *stream* the current one, and its device with it; None leaves all as it is.

    ``torch.cuda.stream`` alone goes back to the thread's own device when it ends, cuda:0 where
    none was chosen, and since CUDA 12 choosing a device opens it: half a GiB on a GPU that the
    process has no other use for (seen on H200s; torch's note on ``cudaSetDevice`` in
    docs/source/notes/cuda.rst). ``torch.cuda.device`` goes back to open devices only.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
