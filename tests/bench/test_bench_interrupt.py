"""``dflash bench`` under ``timeout``, which signals the whole group: what is known is written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_bench.files import read_bench

ENDS_S = 30.0


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(180)
def test_a_bench_that_is_timed_out_keeps_what_it_knows_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    out = tmp_path / "bench.json"
    words = (
        f"bench packing --shape tiny --device cpu --steps 2 --max-time 600 --pairs 500 --json {out}"
    )
    bench = subprocess.Popen(
        [sys.executable, "-m", "dflash.cli.__main__", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert bench.stderr is not None
    for line in bench.stderr:
        if line.startswith("turn 2"):
            break
    os.kill(bench.pid, signal.SIGTERM)
    os.killpg(bench.pid, signal.SIGTERM)
    shown, told = bench.communicate(timeout=60)
    assert bench.returncode == 130, told
    assert "what was measured is kept" in told
    assert "incomplete" in shown
    found = read_bench(out)
    assert not found.complete
    for row in found.rows:
        assert row.state == "measured"
        assert row.per_s is not None
        assert row.memory is not None  # of what is told at the end
        assert row.memory.rss_gib is not None
        assert row.graphs is not None
    ends_at = time.monotonic() + ENDS_S
    while is_alive(bench.pid) and time.monotonic() < ends_at:
        time.sleep(0.1)
    assert not is_alive(bench.pid)
