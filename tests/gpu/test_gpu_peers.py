"""Which calls of another thread a capture survives: what the pages and ``capture`` rest on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import CALLS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not torch.__version__.startswith("2.11."), reason="the table is that of torch 2.11"
    ),
]
HARMLESS = {"nothing", "a kernel", "empty_cache", "copy from pinned memory", "mem_get_info"}
ALWAYS = {"cuda.synchronize": ["capture", "peer"], "torch.rand": ["peer"]}


def test_a_capture_of_its_own_thread_is_broken_by_waiting_for_the_device_alone() -> None:
    """As seen on an H200 (docs/measurements/failures.md)."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("peers.py")), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    found = json.loads(done.stdout)
    for call in CALLS:
        anyhow = ALWAYS.get(call, [])
        in_global = anyhow if call in HARMLESS or anyhow else ["capture", "peer"]
        assert found[f"{call} | global"] == in_global, call
        assert found[f"{call} | thread_local"] == anyhow, call
        assert found[f"{call} | relaxed"] == anyhow, call
