"""On two GPUs: features go from device to device, never through host memory."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run, tiny_config
from torch.profiler import ProfilerActivity, profile

NUM_GPUS = torch.cuda.device_count()
PEERS = NUM_GPUS > 1 and torch.cuda.can_device_access_peer(0, 1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(NUM_GPUS > 1 and not PEERS, reason="cuda:0 and cuda:1 are no peers here"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:.*CUPTI.*"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]
NUM_STEPS, TOKEN_BUDGET = 6, 1024
FEATURE_BYTES = TOKEN_BUDGET * 2 * 16 * 2  # two taps of width 16, bf16


def copies(trace: Path) -> list[tuple[str, int]]:
    """Kind (HtoD, DtoH, DtoD, PtoP) and bytes of every copy that ran on a device."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return [
        (event["name"].split()[1], int(event["args"]["bytes"]))
        for event in events
        if event.get("cat") == "gpu_memcpy"
    ]


def test_features_are_copied_from_peer_to_peer(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = tiny_config(
        place,
        target={"devices": ("cuda:0",)},
        drafter={"devices": ("cuda:1",)},
        execution={"mode": "eager"},
        data={"token_budget": TOKEN_BUDGET},
        optim={"max_steps": NUM_STEPS},
    )
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run(config, tmp_path / "run", say=said.append)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    found = copies(tmp_path / "trace.json")
    of_features = Counter(kind for kind, size in found if size == FEATURE_BYTES)
    assert of_features["PtoP"] + of_features["DtoD"] >= NUM_STEPS, Counter(found)
    # Weights go up in pieces of other sizes when they are loaded; nothing of this size may.
    assert of_features["HtoD"] == of_features["DtoH"] == 0, Counter(found)
    assert not any("host memory" in sentence for sentence in said)
