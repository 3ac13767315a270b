"""The workers on a CPU share its cores while a run lasts, and give them back."""

import threading

import pytest
import torch

from dflash.pipeline.cores import cores_shared_by


@pytest.mark.parametrize(("num_workers", "expected"), [(0, 6), (1, 6), (2, 3), (4, 1), (9, 1)])
def test_every_worker_gets_its_share_in_every_thread(num_workers: int, expected: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    seen: list[int] = []
    try:
        with cores_shared_by(num_workers):
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            seen.append(torch.get_num_threads())
        assert seen == [expected, expected]
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
