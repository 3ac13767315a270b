"""Steps are timed on the device that runs them."""

import time
from itertools import pairwise

import pytest
import torch

from dflash_bench.timing import MatrixProduct, matrix_tflops, time_steps


def test_a_cpu_is_timed_by_the_clock() -> None:
    times_ms = time_steps(lambda number: time.sleep(0.01 * (number + 1)), 3, torch.device("cpu"))
    assert all(10 * (n + 1) <= found < 10 * (n + 1) + 50 for n, found in enumerate(times_ms))
    assert all(one < other for one, other in pairwise(times_ms))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_gpu_that_is_not_the_current_one_is_timed_by_its_own_events() -> None:
    rates = []
    for device in ("cuda:0", "cuda:1"):
        product = MatrixProduct(device)
        product.build()
        started = time.perf_counter()
        times_ms = product.turn()
        torch.cuda.synchronize(device)
        passed_ms = (time.perf_counter() - started) * 1e3
        assert sum(times_ms) <= passed_ms
        rates.append(matrix_tflops([times_ms]))
    assert rates[1] == pytest.approx(rates[0], rel=0.5)
