"""Streams as current ones, on GPUs that need not be the thread's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
