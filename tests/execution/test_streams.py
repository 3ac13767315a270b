"""Current streams, and where nothing but ``on_stream`` may choose one."""

import re
from pathlib import Path

import pytest
import torch

from dflash.execution import on_stream

ROOT = Path(__file__).parents[2]


def test_no_stream_leaves_all_as_it_is() -> None:
    with on_stream(None):
        assert torch.ones(2).sum() == 2.0


def test_the_product_chooses_its_streams_by_on_stream_alone() -> None:
    """``torch.cuda.stream`` opens cuda:0 when it ends; programs of failure modes run on cuda:0."""
    bare = re.compile(r"\btorch\.cuda\.(set_)?stream\(")
    sources = [*(ROOT / "dflash").rglob("*.py"), *(ROOT / "dflash_bench").rglob("*.py")]
    with_it = [
        str(path.relative_to(ROOT))
        for path in sources
        if bare.search(path.read_text(encoding="utf-8")) and path.parent.name != "failures"
    ]
    assert with_it == ["dflash/execution/streams.py"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_stream_and_its_device_are_current_inside_and_as_before_afterwards() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream()
    with on_stream(stream):
        assert torch.cuda.current_device() == device.index
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == before
