"""Programs that fail on a GPU, each in a real way, and what watching says of them."""

from pathlib import Path

import pytest
import torch
from watched_programs import diagnosed, slugs, written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
THREADS_LACK_TREES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
CAPTURES_ON_FIRST_USE = """
import threading, torch
steps = [
    torch.compile(step, mode="reduce-overhead")
    for step in (lambda x: (x @ x).sin().sum(), lambda x: (x @ x).cos().sum())
]
x = torch.ones(64, 64, device="cuda")
def worker(step):
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        step(x)
for step in steps:  # one after the other: no race, only a state that the second thread lacks
    thread = threading.Thread(target=worker, args=(step,))
    thread.start(), thread.join()
"""
CAPTURES_BESIDE_A_MALLOC = """
import threading, torch
x, opened, done = torch.ones(1024, device="cuda"), threading.Event(), threading.Event()
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
x.add_(1), torch.cuda.synchronize()
def capturing():
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="global")
        opened.set(), done.wait(20)
        graph.capture_end()
def loading():
    opened.wait(20)
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    finally:
        done.set()
threads = [threading.Thread(target=work, name=work.__name__) for work in (capturing, loading)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""
KEEPS_AN_OUTPUT = """
import torch
step = torch.compile(lambda x: (x @ x).sin(), mode="reduce-overhead")
x = torch.ones(64, 64, device="cuda")
with torch.no_grad():
    for _ in range(4):
        first, second = step(x), step(x)
        (first + second).sum().item()
"""
CAPTURED_ONE_AFTER_THE_OTHER = """
import threading, torch
torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
def worker():
    x, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.mul_(2)
    graph.replay(), graph.replay()
    assert x.sum().item() == 64 * 4
for _ in range(2):
    thread = threading.Thread(target=worker)
    thread.start(), thread.join()
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(
            CAPTURES_ON_FIRST_USE,
            ["cudagraph-trees"] if THREADS_LACK_TREES else [],
            id="captures on first use",
        ),
        pytest.param(CAPTURES_BESIDE_A_MALLOC, ["capture-race"], id="captures beside a malloc"),
        pytest.param(KEEPS_AN_OUTPUT, ["missing-step-mark"], id="keeps an output"),
        pytest.param(CAPTURED_ONE_AFTER_THE_OTHER, [], id="captures one after the other"),
    ],
)
def test_a_program_suffers_from_what_it_does_wrong_and_from_nothing_else(
    program: str, expected: list[str], tmp_path: Path
) -> None:
    assert slugs(diagnosed(written(tmp_path, program))) == expected
