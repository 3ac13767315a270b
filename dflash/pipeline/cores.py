"""How the workers on a CPU share its cores."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cores_shared_by(num_workers: int) -> Iterator[None]:
    """Give each of *num_workers* threads that compute on the CPU its share of the cores.

    Inside, torch uses cores // workers (at least 1) threads per kernel, in this thread and in
    every one started from now on. Target and drafter then overlap on cores of their own. Letting
    each use all cores, one after the other, made the quickstart's step 1.7 times as long
    (docs/measurements/quickstart.md): its kernels are too small to gain from a second core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // max(1, num_workers)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
